"""Qwen3-VL: as Qwen2-VL, and the decoder's first layers take levels of their own (deepstack)."""

from dataclasses import replace
from typing import Any

from chiasm.models.families import qwen2_vl


def level_count(config: Any) -> int:
    """A level for each tower layer that deepstack taps."""
    return len(config.vision_config.deepstack_visual_indexes)


FAMILY = replace(
    qwen2_vl.FAMILY,
    model_type="qwen3_vl",
    title="Qwen3-VL",
    width_tensor="visual.merger.linear_fc2.weight",
    level_count=level_count,
)
