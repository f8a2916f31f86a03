"""Qwen3.5: pictures as in Qwen3-VL without its levels, a decoder with recurrent layers."""

from typing import Any

from chiasm.models.families.grids import OPTIONS, GridRows, qwen_rows
from chiasm.models.families.names import under
from chiasm.models.family import Family, Sources, stateful

# Published checkpoints hold a head that guesses several tokens ahead; neither half has it.
_UNUSED = "mtp"


def refusal(config: Any) -> str | None:
    return None


def image_rule(sources: Sources) -> GridRows:
    return qwen_rows(sources.image_processor)


FAMILY = Family(
    model_type="qwen3_5",
    title="Qwen3.5",
    vision_modules=("model.visual", _UNUSED),
    language_modules=("model.language_model", "lm_head", _UNUSED),
    width_tensor="visual.merger.linear_fc2.weight",
    settings=("vision_config",),
    vision_tensor_name=under("visual"),
    refusal=refusal,
    image_rule=image_rule,
    positions="mrope",
    layers=stateful,
    needs=("grid_thw",),
    options=OPTIONS,
)
