"""PaliGemma: a SigLIP tower on one fixed size, one linear layer, a prompt that sees all of itself.

The published checkpoints have no chat template. transformers' processor puts `<bos>` behind the
last picture and a line break at the end of the prompt; a template for this family does the same.
"""

from typing import Any

from chiasm.models.contract import FixedRows
from chiasm.models.families.llava import vision_tensor_name
from chiasm.models.family import Family, Sources, stateful

DECODERS = ("gemma", "gemma2")


def refusal(config: Any) -> str | None:
    tower, decoder = config.vision_config.model_type, config.text_config.model_type
    if tower != "siglip_vision_model":
        return f"its vision tower is {tower!r}; tested for paligemma is siglip_vision_model"
    if decoder not in DECODERS:
        return f"its decoder is {decoder!r}; tested for paligemma are {', '.join(DECODERS)}"
    return None


def image_rule(sources: Sources) -> FixedRows:
    vision = sources.config.vision_config
    return FixedRows((vision.image_size // vision.patch_size) ** 2)


FAMILY = Family(
    model_type="paligemma",
    title="PaliGemma",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear.weight",
    settings=("vision_config", "projection_dim"),
    vision_tensor_name=vision_tensor_name,
    refusal=refusal,
    image_rule=image_rule,
    layers=stateful,
)
