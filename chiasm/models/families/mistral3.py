"""Mistral Small 3.1 and later: a Pixtral tower whose cells are merged, and Mistral's decoder."""

from typing import Any

from chiasm.models.families.decoders import layers_of
from chiasm.models.families.lines import LinedRows, lined_rows
from chiasm.models.families.names import under
from chiasm.models.family import Family, Sources


def refusal(config: Any) -> str | None:
    tower = config.vision_config.model_type
    return None if tower == "pixtral" else f"its vision tower is {tower!r}; tested is pixtral"


def image_rule(sources: Sources) -> LinedRows:
    return lined_rows(sources, sources.config.spatial_merge_size)


FAMILY = Family(
    model_type="mistral3",
    title="Mistral 3",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=(
        "vision_config",
        "vision_feature_layer",
        "projector_hidden_act",
        "multimodal_projector_bias",
        "spatial_merge_size",
    ),
    vision_tensor_name=under("vision_tower", "multi_modal_projector"),
    refusal=refusal,
    image_rule=image_rule,
    layers=layers_of,
    needs=("image_size",),
)
