"""Rows of the Pixtral tower: a picture keeps its shape, and each line of rows ends with a token.

Pixtral (https://arxiv.org/abs/2410.07073, section 2.2).
"""

from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from chiasm.models.contract import (
    ContractError,
    Grid,
    ImageForm,
    Piece,
    PixelOptions,
    Size,
    fixed_pixels,
    of_stated_size,
)
from chiasm.models.family import Sources


@dataclass(frozen=True)
class LinedRows:
    """A row for each cell of a picture scaled down to `longest_edge`.

    Attributes:
        cell: pixels of a cell's side.
        line_end, image_end: tokens after each line but the last, and after the last.
        one_row: whether transformers' model encodes an image of a single cell.
    """

    longest_edge: int
    cell: int
    line_end: str
    image_end: str
    one_row: bool = True

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        form = self._form(size)
        if form.row_count == 1 and not self.one_row:
            raise ContractError(
                f"the image has {size[0]} x {size[1]} pixels (height x width); this model's code "
                f"cannot encode one of a single cell: scale a side to more than {self.cell} pixels"
            )
        return form

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        return of_stated_size(self._form, row_count, grid_thw, size)

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        # The image processor alone knows the tower's patches, not that cells of them are merged.
        return {**fixed_pixels(options), "patch_size": {"height": self.cell, "width": self.cell}}

    def _form(self, size: Size) -> ImageForm:
        height, width = size
        ratio = max(height, width) / self.longest_edge
        if ratio > 1:
            height, width = floor(height / ratio), floor(width / ratio)
        lines, columns = ceil(height / self.cell), ceil(width / self.cell)
        if not lines or not columns:
            raise ContractError(
                f"the image has {size[0]} x {size[1]} pixels (height x width): scaled to the "
                f"model's {self.longest_edge} nothing is left of its short side; crop it"
            )
        text: list[Piece] = [columns, self.line_end] * lines
        return ImageForm(lines * columns, (*text[:-1], self.image_end))


def lined_rows(sources: Sources, merge_size: int) -> LinedRows:
    """The rule that a config, its processor and image processor give."""
    told = sources.processor
    return LinedRows(
        longest_edge=int(sources.image_processor.size["longest_edge"]),
        cell=sources.config.vision_config.patch_size * merge_size,
        line_end=str(told.get("image_break_token", "[IMG_BREAK]")),
        image_end=str(told.get("image_end_token", "[IMG_END]")),
        # Mistral 3's projector has no extent for the batch, and transformers drops that of one row.
        one_row=sources.config.model_type != "mistral3",
    )
