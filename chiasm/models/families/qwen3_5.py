"""Qwen3.5: pictures as in Qwen3-VL without its levels, a decoder with recurrent layers."""

from dataclasses import replace

from chiasm.models.families import qwen2_vl
from chiasm.models.family import stateful

# Published checkpoints hold a head that guesses several tokens ahead; neither half has it.
_UNUSED = "mtp"

FAMILY = replace(
    qwen2_vl.FAMILY,
    model_type="qwen3_5",
    title="Qwen3.5",
    vision_modules=(*qwen2_vl.FAMILY.vision_modules, _UNUSED),
    language_modules=(*qwen2_vl.FAMILY.language_modules, _UNUSED),
    width_tensor="visual.merger.linear_fc2.weight",
    layers=stateful,
)
