"""Aya Vision: numbered tiles and then the whole picture, equally many rows each.

https://arxiv.org/abs/2505.08751
"""

from dataclasses import dataclass
from typing import Any

from chiasm.models.contract import ImageForm, Piece
from chiasm.models.families.decoders import layers_of
from chiasm.models.families.internvl import TileRows
from chiasm.models.families.llava import vision_tensor_name
from chiasm.models.family import Family, Sources


@dataclass(frozen=True)
class NumberedTiles(TileRows):
    """Each tile has its number before its rows, from 1; the whole picture comes last.

    Attributes:
        tile: text before the number of a tile.
        whole: text before the rows of the whole picture.
    """

    tile: str
    whole: str

    def _form(self, rows: int) -> ImageForm:
        pieces: list[Piece] = [self.before]
        for number in range(1, rows // self.tile_rows):
            pieces += [f"{self.tile}_{number}", self.tile_rows]
        return ImageForm(rows, (*pieces, self.whole, self.tile_rows, self.after))


def refusal(config: Any) -> str | None:
    tower = config.vision_config.model_type
    if tower != "siglip_vision_model":
        return f"its vision tower is {tower!r}; tested for aya_vision is siglip_vision_model"
    # SigLIP has no class token to drop: the rows would no longer make a square.
    if config.vision_feature_select_strategy != "full":
        return "its vision_feature_select_strategy must be 'full'"
    return None


def marker(sources: Sources) -> str:
    return str(sources.processor.get("image_token", "<image>"))


def image_rule(sources: Sources) -> NumberedTiles:
    config, named = sources.config, sources.processor
    side = config.vision_config.image_size // config.vision_config.patch_size
    return NumberedTiles(
        tile_rows=(side // config.downsample_factor) ** 2,
        most_tiles=int(sources.image_processor.max_patches),
        before=str(named.get("start_of_img_token", "<|START_OF_IMG|>")),
        after=str(named.get("end_of_img_token", "<|END_OF_IMG|>")),
        image_processor=sources.image_processor,
        tile=str(named.get("tile_token", "TILE")),
        whole=str(named.get("tile_global_token", "TILE_GLOBAL")),
    )


FAMILY = Family(
    model_type="aya_vision",
    title="Aya Vision",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=(
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "downsample_factor",
        "adapter_layer_norm_eps",
    ),
    vision_tensor_name=vision_tensor_name,
    refusal=refusal,
    image_rule=image_rule,
    marker=marker,
    layers=layers_of,
)
