"""The collector's settings of a process."""

import gc

from chiasm import memory


def test_what_is_made_to_last_is_out_of_the_collectors_sight() -> None:
    try:
        with memory.lasting():
            assert not gc.isenabled()
            lasting = [[number] for number in range(1000)]
        assert gc.isenabled()
        seen = {id(one) for one in gc.get_objects()}
        assert not any(id(one) in seen for one in lasting)
    finally:
        gc.unfreeze()


def test_a_failed_import_leaves_the_collector_running() -> None:
    try:
        with memory.lasting():
            raise ImportError
    except ImportError:
        assert gc.isenabled()
    finally:
        gc.unfreeze()
