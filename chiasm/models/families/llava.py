"""LLaVA 1.5 and Pixtral: one class of transformers with different towers.

LLaVA's CLIP or SigLIP tower scales every picture to one size; Pixtral's keeps the shape.
"""

from typing import Any

from chiasm.models.contract import FixedRows, ImageRule
from chiasm.models.families.decoders import layers_of
from chiasm.models.families.lines import lined_rows
from chiasm.models.family import Family, Sources

TOWERS = ("clip_vision_model", "siglip_vision_model")
PIXTRAL = "pixtral"
SETTINGS = (
    "vision_config",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "projector_hidden_act",
    "multimodal_projector_bias",
)


def vision_tensor_name(stored: str) -> str | None:
    """`vision_tower.vision_model.*` and the newer `model.vision_tower.*` give `vision_tower.*`."""
    name = stored.removeprefix("model.")
    # A constant that old versions of transformers saved beside the weights.
    if name.endswith(".position_ids"):
        return None
    if name.startswith("vision_tower."):
        tower_name = name.removeprefix("vision_tower.").removeprefix("vision_model.")
        return f"vision_tower.{tower_name}"
    return name if name.startswith("multi_modal_projector.") else None


def refusal(config: Any) -> str | None:
    tower = config.vision_config.model_type
    if tower not in (*TOWERS, PIXTRAL):
        return f"its vision tower is {tower!r}; tested are {', '.join((*TOWERS, PIXTRAL))}"
    return None


def image_rule(sources: Sources) -> ImageRule:
    if sources.config.vision_config.model_type == PIXTRAL:
        return lined_rows(sources, merge_size=1)
    return _fixed_rows(sources.config)


def _fixed_rows(config: Any) -> FixedRows:
    """Patches, plus CLIP's class token, minus the first row where the strategy drops it.

    The tower itself refuses any other size than `image_size`, so the count holds for every image.
    """
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    class_tokens = 1 if vision.model_type == "clip_vision_model" else 0
    dropped = 1 if config.vision_feature_select_strategy == "default" else 0
    return FixedRows(patches + class_tokens - dropped)


FAMILY = Family(
    model_type="llava",
    title="LLaVA 1.5, Pixtral",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=SETTINGS,
    vision_tensor_name=vision_tensor_name,
    refusal=refusal,
    image_rule=image_rule,
    layers=layers_of,
)
