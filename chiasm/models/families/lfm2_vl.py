"""LFM2-VL: named tiles and then the whole picture, each with rows of its own number.

https://arxiv.org/abs/2511.23404. Pictures up to about twice the tower's budget are not split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chiasm.models.checkpoint import CheckpointError
from chiasm.models.contract import (
    Grid,
    ImageForm,
    Piece,
    PixelOptions,
    Size,
    fixed_pixels,
    of_stated_size,
)
from chiasm.models.families.llava import vision_tensor_name
from chiasm.models.families.names import token
from chiasm.models.family import Family, OwnImageProcessor, Sources, stateful


@dataclass(frozen=True)
class UnevenTiles:
    """Rows follow from the sizes of what is encoded, one a cell.

    A picture that is split into one tile alone (where `min_tiles` is 1) has the tile's rows;
    transformers counts those of the whole as scaled, and cannot run it where the two differ.

    Attributes:
        tiling: `chiasm.models.processors.lfm2_vl.Tiling`.
        before, after: the text around a picture.
        whole: the text before the rows of a whole picture after its tiles.
        named: whether tiles and the whole have their names before them.
    """

    tiling: Any
    before: str
    after: str
    whole: str
    named: bool

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        layout = self.tiling.layout(size)
        rows = [height * width // self.tiling.cell**2 for height, width in layout.sizes]
        text = tuple(self._text(rows, layout.lines, layout.columns))
        return ImageForm(sum(rows), (self.before, *text, self.after) if self.named else text)

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        return of_stated_size(
            lambda known: self.of_size(known, PixelOptions()), row_count, grid_thw, size
        )

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return fixed_pixels(options)

    def _text(self, rows: list[int], lines: int, columns: int) -> Iterator[Piece]:
        tile_count = lines * columns
        for number, count in enumerate(rows):
            if self.named and tile_count > 1:
                line, column = divmod(number, columns)
                tile = f"<|img_row_{line + 1}_col_{column + 1}|>"
                yield tile if number < tile_count else self.whole
            yield count


def refusal(config: Any) -> str | None:
    tower = config.vision_config.model_type
    if tower != "siglip2_vision_model":
        return f"its vision tower is {tower!r}; tested for lfm2_vl is siglip2_vision_model"
    decoder = config.text_config.model_type
    if decoder != "lfm2":
        return f"its decoder is {decoder!r}; tested for lfm2_vl is lfm2"
    return None


def image_rule(sources: Sources) -> UnevenTiles:
    tiling = sources.image_processor.tiling()
    config = sources.config
    for name, stated, expected in (
        ("encoder_patch_size", tiling.encoder_patch_size, config.vision_config.patch_size),
        ("downsample_factor", tiling.downsample_factor, config.downsample_factor),
    ):
        if stated != expected:
            raise CheckpointError(
                f"the image processor's {name} is {stated}, the model's is {expected}; take both "
                "of one checkpoint"
            )
    return UnevenTiles(
        tiling=tiling,
        before=token(sources, "image_start_token", "<|image_start|>"),
        after=token(sources, "image_end_token", "<|image_end|>"),
        whole=token(sources, "image_thumbnail_token", "<|img_thumbnail|>"),
        named=bool(sources.processor.get("use_image_special_tokens", True)),
    )


def _make_processor(settings: Mapping[str, Any]) -> Any:
    # Loads transformers, which listing the families must not.
    from chiasm.models.processors.lfm2_vl import Lfm2VlImageProcessorPil

    return Lfm2VlImageProcessorPil.from_dict(dict(settings))


FAMILY = Family(
    model_type="lfm2_vl",
    title="LFM2-VL",
    vision_modules=("model.vision_tower", "model.multi_modal_projector"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="multi_modal_projector.linear_2.weight",
    settings=(
        "vision_config",
        "downsample_factor",
        "projector_hidden_act",
        "projector_use_layernorm",
        "projector_bias",
    ),
    vision_tensor_name=vision_tensor_name,
    refusal=refusal,
    image_rule=image_rule,
    layers=stateful,
    needs=("image_size",),
    own_processor=OwnImageProcessor(
        replaces="Lfm2VlImageProcessorPil",
        name="chiasm.Lfm2VlImageProcessorPil.1",
        make=_make_processor,
    ),
)
