"""The allocator's and the collector's settings, applied first thing in every process.

glibc serves a large block by a fresh mapping and gives it back when it is freed, so that every
tensor that passes through faults all its pages again. Keeping such blocks on the heap makes 40 MB
messages several times faster. Freed memory then stays with the process until `release` is called.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Constants of glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

_GIB = 1 << 30


def tune() -> bool:
    """Keeps large freed blocks on the heap. Returns False where the C library is not glibc."""
    libc = _glibc()
    if libc is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _GIB),
        (_M_TRIM_THRESHOLD, 2 * _GIB - 1),
        (_M_TOP_PAD, 64 << 20),
    )
    return all(libc.mallopt(option, value) == 1 for option, value in settings)


@contextmanager
def lasting() -> Iterator[None]:
    """What is made inside stays for as long as the process; Python's collector never looks at it.

    For the imports of large libraries: with the collector they take a sixth longer, and each full
    collection would go through their 400,000 objects again, in the middle of an answer.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def release() -> bool:
    """Returns free heap memory to the system; meant for idle moments (it takes milliseconds)."""
    libc = _glibc()
    return libc is not None and libc.malloc_trim(0) == 1


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
