"""Gemma 3: a SigLIP tower on one fixed size, pooled to 256 rows, which see each other."""

from dataclasses import dataclass
from typing import Any

from chiasm.models.contract import FixedRows, PixelOptions
from chiasm.models.families.llava import vision_tensor_name
from chiasm.models.families.names import token
from chiasm.models.family import Family, Sources, stateful


@dataclass(frozen=True)
class WholePictures(FixedRows):
    """Pictures are never cut: transformers' processor asks for crops only where a caller does."""

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return {**super().processor_options(options), "do_pan_and_scan": False}


def refusal(config: Any) -> str | None:
    tower = config.vision_config.model_type
    if tower != "siglip_vision_model":
        return f"its vision tower is {tower!r}; tested for gemma3 is siglip_vision_model"
    return None


def marker(sources: Sources) -> str:
    return token(sources, "boi_token", "<start_of_image>")


def image_rule(sources: Sources) -> WholePictures:
    end = token(sources, "eoi_token", "<end_of_image>")
    return WholePictures(
        sources.config.mm_tokens_per_image, (f"\n\n{marker(sources)}",), (f"{end}\n\n",)
    )


FAMILY = Family(
    model_type="gemma3",
    title="Gemma 3",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.mm_input_projection_weight",
    width_axis=1,
    settings=("vision_config", "mm_tokens_per_image"),
    vision_tensor_name=vision_tensor_name,
    refusal=refusal,
    image_rule=image_rule,
    marker=marker,
    layers=stateful,
)
