"""The count of answers that differ beside others."""

from pathlib import Path

import pytest
import torch

from benchmarks.engine_agree import agreements, first_difference
from tests.tiny_llava import build_tiny_llava


@pytest.mark.parametrize(
    ("other", "place"), [([1, 2, 3], None), ([9, 2, 3], 1), ([1, 2, 9], 3), ([1, 9, 9], 2)]
)
def test_the_first_difference_is_counted_from_one(other: list[int], place: int | None) -> None:
    assert first_difference([1, 2, 3], other) == place


def test_in_float32_no_answer_differs_by_any_layers(tmp_path: Path) -> None:
    model = build_tiny_llava(tmp_path / "tiny", context_length=256)
    threads = torch.get_num_threads()
    try:
        found = list(agreements(model, "float32", 1, count=6, context=40, new_tokens=10))
    finally:
        torch.set_num_threads(threads)
    # The native layers are missing where there is no C compiler.
    assert found[-1].layers == "transformers"
    for one in found:
        assert (one.answers, one.tokens, one.alike, one.places) == (6, 60, 60, ())
        assert one.share == 0
