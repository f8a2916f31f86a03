"""Idefics3 and SmolVLM: tiles in lines and columns, each named in the prompt, then the whole.

https://arxiv.org/abs/2408.12637, section 2.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from chiasm.models.contract import (
    Grid,
    ImageForm,
    Piece,
    PixelOptions,
    Size,
    fixed_pixels,
    no_grid,
    of_stated_size,
)
from chiasm.models.families.decoders import layers_of
from chiasm.models.families.names import under
from chiasm.models.family import Family, Sources

_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


@dataclass(frozen=True)
class NamedTiles:
    """`tile_rows` rows for each tile and for the whole picture."""

    tile_rows: int
    image_processor: Any = field(repr=False)

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        return self._form(*self._lines_and_columns(size))

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        no_grid(grid_thw)
        if size is None and row_count == self.tile_rows:
            return self._form(0, 0)
        return of_stated_size(
            lambda known: self.of_size(known, PixelOptions()), row_count, grid_thw, size
        )

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return fixed_pixels(options)

    def _lines_and_columns(self, size: Size) -> tuple[int, int]:
        """As the image processor's `resize_for_vision_encoder` and `split_images`.

        Its `get_number_of_image_patches` says other numbers where tiles do not divide the edge.
        """
        if not self.image_processor.do_image_splitting:
            return 0, 0
        tile = self.image_processor.max_image_size["longest_edge"]
        height, width = self._scaled(size)
        ratio = width / height
        if width >= height:
            columns = ceil(width / tile)
            lines = ceil(int(columns * tile / ratio) / tile)
        else:
            lines = ceil(height / tile)
            columns = ceil(int(lines * tile * ratio) / tile)
        return (lines, columns) if lines * columns > 1 else (0, 0)

    def _scaled(self, size: Size) -> Size:
        from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3

        to = self.image_processor.size
        if not self.image_processor.do_resize:
            return size
        if not to.longest_edge:
            return to.height, to.width
        # It reads nothing but the shape.
        blank = np.broadcast_to(np.uint8(0), size)
        height, width = idefics3.get_resize_output_image_size(blank, to.longest_edge)
        return height, width

    def _form(self, lines: int, columns: int) -> ImageForm:
        rows = self.tile_rows * (lines * columns + 1)
        return ImageForm(rows, tuple(self._text(lines, columns)))

    def _text(self, lines: int, columns: int) -> Iterator[Piece]:
        for line in range(1, lines + 1):
            for column in range(1, columns + 1):
                yield f"{_AROUND}<row_{line}_col_{column}>"
                yield self.tile_rows
            yield "\n"
        yield ("\n" if lines else "") + _AROUND + _WHOLE
        yield self.tile_rows
        yield _AROUND


def refusal(config: Any) -> str | None:
    return None


def image_rule(sources: Sources) -> NamedTiles:
    config = sources.config
    side = config.vision_config.image_size // config.vision_config.patch_size
    return NamedTiles(side**2 // config.scale_factor**2, sources.image_processor)


FAMILY = Family(
    model_type="idefics3",
    title="Idefics3",
    vision_modules=("model.vision_model", "model.connector"),
    language_modules=("model.text_model", "lm_head"),
    width_tensor="connector.modality_projection.proj.weight",
    settings=("vision_config", "scale_factor"),
    vision_tensor_name=under("vision_model", "connector"),
    refusal=refusal,
    image_rule=image_rule,
    layers=layers_of,
    needs=("image_size",),
)
