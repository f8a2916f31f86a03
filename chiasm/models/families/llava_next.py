"""LLaVA-NeXT (1.6): a picture whole and in tiles, rows of padding cut away."""

from typing import Any

from chiasm.models.families.decoders import layers_of
from chiasm.models.families.llava import SETTINGS, TOWERS, vision_tensor_name
from chiasm.models.families.tiles import TiledRows, tiled_rows, wrong_strategy
from chiasm.models.family import Family, Sources


def tensor_name(stored: str) -> str | None:
    """As LLaVA's; the newline's row is the vision half's, though no module of it holds it."""
    name = stored.removeprefix("model.")
    return name if name == "image_newline" else vision_tensor_name(stored)


def refusal(config: Any) -> str | None:
    tower = config.vision_config.model_type
    if tower not in TOWERS:
        return f"its vision tower is {tower!r}; tested are {', '.join(TOWERS)}"
    return wrong_strategy(config)


def image_rule(sources: Sources) -> TiledRows:
    return tiled_rows(sources)


FAMILY = Family(
    model_type="llava_next",
    title="LLaVA-NeXT",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=(*SETTINGS, "image_grid_pinpoints"),
    vision_tensor_name=tensor_name,
    refusal=refusal,
    image_rule=image_rule,
    layers=layers_of,
    needs=("image_size",),
)
