"""LLaVA 1.5: a CLIP or SigLIP tower on one fixed image size, two linear layers, a text decoder."""

from typing import Any

from chiasm.models.contract import FixedRows
from chiasm.models.family import Family, Sources

TOWERS = ("clip_vision_model", "siglip_vision_model")
DECODERS = ("llama", "qwen2")


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
    tower, decoder = config.vision_config.model_type, config.text_config.model_type
    if tower not in TOWERS:
        return f"its vision tower is {tower!r}; tested for llava are {', '.join(TOWERS)}"
    if decoder not in DECODERS:
        return f"its decoder is {decoder!r}; tested for llava are {', '.join(DECODERS)}"
    if getattr(config.text_config, "use_sliding_window", False):
        return "its decoder uses sliding-window attention, which is not supported"
    return None


def image_rule(sources: Sources) -> FixedRows:
    """Patches, plus CLIP's class token, minus the first row where the strategy drops it.

    The tower itself refuses any other size than `image_size`, so the count holds for every image.
    """
    config = sources.config
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    class_tokens = 1 if vision.model_type == "clip_vision_model" else 0
    dropped = 1 if config.vision_feature_select_strategy == "default" else 0
    return FixedRows(patches + class_tokens - dropped)


FAMILY = Family(
    model_type="llava",
    title="LLaVA 1.5",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=(
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "projector_hidden_act",
        "multimodal_projector_bias",
    ),
    vision_tensor_name=vision_tensor_name,
    refusal=refusal,
    image_rule=image_rule,
)
