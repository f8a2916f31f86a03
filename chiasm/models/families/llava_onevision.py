"""LLaVA-OneVision: as LLaVA-NeXT, with rows of many tiles scaled down.

Every picture goes in tiles, as the processor does it with a flat list of pictures.
"""

import re
from typing import Any

from chiasm.models.families import llava_next
from chiasm.models.families.decoders import layers_of
from chiasm.models.families.llava import SETTINGS
from chiasm.models.families.tiles import TiledRows, tiled_rows
from chiasm.models.family import Family, Sources

_ASPECT = re.compile(r"anyres_max_(\d+)")


def refusal(config: Any) -> str | None:
    if not _ASPECT.fullmatch(config.vision_aspect_ratio):
        return f"its vision_aspect_ratio is {config.vision_aspect_ratio!r}, not anyres_max_N"
    return llava_next.refusal(config)


def image_rule(sources: Sources) -> TiledRows:
    found = _ASPECT.fullmatch(sources.config.vision_aspect_ratio)
    assert found is not None  # `refusal` has seen to it
    return tiled_rows(sources, int(found[1]))


FAMILY = Family(
    model_type="llava_onevision",
    title="LLaVA-OneVision",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=(*SETTINGS, "image_grid_pinpoints", "vision_aspect_ratio"),
    vision_tensor_name=llava_next.tensor_name,
    refusal=refusal,
    image_rule=image_rule,
    layers=layers_of,
    needs=("image_size",),
)
