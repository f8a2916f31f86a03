"""InternVL 2.5 and 3, in transformers' own form: tiles and a thumbnail, equally many rows each."""

from dataclasses import dataclass, field
from typing import Any, Final

from chiasm.models.contract import (
    ContractError,
    Grid,
    ImageForm,
    PixelOptions,
    Size,
    fixed_pixels,
    no_grid,
)
from chiasm.models.families.decoders import layers_of
from chiasm.models.families.names import under
from chiasm.models.family import Family, Sources

# What transformers' processor asks of its image processor, whatever the latter's own settings.
_TILES: Final = {"crop_to_patches": True}


@dataclass(frozen=True)
class TileRows:
    """`tile_rows` rows a tile, and so many for a thumbnail where there are several tiles."""

    tile_rows: int
    most_tiles: int
    before: str
    after: str
    image_processor: Any = field(repr=False)

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        tiles = self.image_processor.get_number_of_image_patches(*size, dict(_TILES))
        return self._form(tiles * self.tile_rows)

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        no_grid(grid_thw)
        if size is not None and self.of_size(size, PixelOptions()).row_count != row_count:
            raise ContractError(
                f"an image of {size[0]} x {size[1]} pixels (height x width) has other than "
                f"{row_count} rows in this model"
            )
        tiles, over = divmod(row_count, self.tile_rows)
        # With a thumbnail there are two tiles besides, at least.
        if over or tiles == 2 or not 1 <= tiles <= self.most_tiles + 1:
            raise ContractError(
                f"an image of this model has {self.tile_rows} rows, or that times 3 to "
                f"{self.most_tiles + 1}; the embedding has {row_count}"
            )
        return self._form(row_count)

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return {**fixed_pixels(options), **_TILES}

    def _form(self, rows: int) -> ImageForm:
        return ImageForm(rows, (self.before, rows, self.after))


def refusal(config: Any) -> str | None:
    return None


def image_rule(sources: Sources) -> TileRows:
    rows = sources.processor.get("image_seq_length", sources.config.image_seq_length)
    return TileRows(
        tile_rows=int(rows),
        most_tiles=int(sources.image_processor.max_patches),
        before=str(sources.tokenizer.get("start_image_token", "<img>")),
        after=str(sources.tokenizer.get("end_image_token", "</img>")),
        image_processor=sources.image_processor,
    )


FAMILY = Family(
    model_type="internvl",
    title="InternVL",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=(
        "vision_config",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "downsample_ratio",
        "projector_hidden_act",
    ),
    vision_tensor_name=under("vision_tower", "multi_modal_projector"),
    refusal=refusal,
    image_rule=image_rule,
    layers=layers_of,
)
