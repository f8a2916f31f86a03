"""Qwen2.5-VL: as Qwen2-VL, with windows in the tower."""

from typing import Any

from chiasm.models.families.grids import OPTIONS, GridRows, qwen_rows
from chiasm.models.families.names import under
from chiasm.models.family import Family, Sources


def refusal(config: Any) -> str | None:
    if getattr(config.text_config, "use_sliding_window", False):
        return "its decoder uses sliding-window attention, which is not supported"
    return None


def image_rule(sources: Sources) -> GridRows:
    return qwen_rows(sources.image_processor)


FAMILY = Family(
    model_type="qwen2_5_vl",
    title="Qwen2.5-VL",
    vision_modules=("model.visual",),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="visual.merger.mlp.2.weight",
    settings=("vision_config",),
    vision_tensor_name=under("visual"),
    refusal=refusal,
    image_rule=image_rule,
    positions="mrope",
    needs=("grid_thw",),
    options=OPTIONS,
)
