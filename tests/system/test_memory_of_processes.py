"""Neither half of a checkpoint is in the memory of the process that serves the other."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors

from tests.system.footprint import memory
from tests.system.processes import start_encoder, start_llm
from tests.system.three import Three
from tests.tiny_llava import build_tiny_llava

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

MIB = 1 << 20
# Beside the weights: what the sizes of layers add to buffers, and the allocator's own.
SLACK = 24 * MIB
LANGUAGE_PREFIX = "language_model."
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Weights:
    """Bytes of the two halves in a checkpoint's file."""

    vision: int
    language: int


def weights(checkpoint: Path) -> Weights:
    """The sizes in the file, without loading it."""
    sizes = {True: 0, False: 0}
    with safetensors.safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            count = math.prod(file.get_slice(name).get_shape())
            sizes[name.startswith(LANGUAGE_PREFIX)] += count * FLOAT32_BYTES
    return Weights(vision=sizes[False], language=sizes[True])


def test_each_process_holds_its_own_half_only(tiny: Three, tmp_path: Path) -> None:
    large = build_tiny_llava(
        tmp_path / "large", hidden_size=512, layer_count=7,
        vision_hidden_size=480, vision_layer_count=9,
    )  # fmt: skip
    half = weights(large)
    both = half.vision + half.language
    assert min(half.vision, half.language) > 55 * MIB
    # What such a process holds beside weights is in the tiny ones too: the rest is the weights.
    base_encoder, base_llm, _ = tiny.memory_at_start
    with start_encoder(large) as process:
        encoder = memory(process) - base_encoder
    with start_llm(large) as process:
        llm = memory(process) - base_llm
    with start_llm(large, "--vision", "local") as process:
        whole = memory(process) - base_llm

    # A whole model shows in these figures, so a half that crept in would as well.
    assert both - SLACK < whole.now < both + SLACK
    assert half.vision - SLACK < encoder.now < half.vision + SLACK
    assert half.language - SLACK < llm.now < half.language + SLACK
    # Not even for a moment were both halves there together.
    assert encoder.peak < both - SLACK < whole.peak
    assert llm.peak < both - SLACK
