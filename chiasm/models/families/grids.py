"""Rules of the families that scale a picture to a grid of patches and merge cells of it.

Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1) and those that follow it. A request may
bound the pixels after scaling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from chiasm.models.contract import ContractError, Grid, ImageForm, PixelOptions, Size

OPTIONS: Final = ("detail", "min_pixels", "max_pixels")
# `low` is a picture of 512 x 512 pixels, as in OpenAI's interface, or a quarter of the most.
_LOW_PIXELS: Final = 512 * 512
_LOW_SHARE: Final = 4

Resize = Callable[[int, int, int, int, int], tuple[int, int]]
"""(height, width, factor, least pixels, most pixels) to the scaled height and width."""


@dataclass(frozen=True)
class Budget:
    """Bounds on height times width after scaling, times `GridRows.frames`."""

    least: int
    most: int


@dataclass(frozen=True)
class GridRows:
    """A row for each cell of `merge_size` x `merge_size` patches.

    Attributes:
        checkpoint: the bounds that the checkpoint's image processor has.
        resize: transformers' own arithmetic; raises ValueError for a size it does not take.
        frames: of a still picture, where the image processor's bounds count pixels of all frames.
    """

    patch_size: int
    merge_size: int
    checkpoint: Budget
    resize: Resize
    frames: int = 1

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        budget = self._budget(options)
        try:
            height, width = self.resize(*size, self._cell, budget.least, budget.most)
        except ValueError as error:
            raise ContractError(
                f"the image has {size[0]} x {size[1]} pixels (height x width), which the model "
                "cannot scale: one side is too short, or too long for the other; crop it"
            ) from error
        form = self._form((1, height // self.patch_size, width // self.patch_size))
        if not form.row_count:
            raise ContractError(
                f"the image has {size[0]} x {size[1]} pixels (height x width), too few for one row "
                "of this model; enlarge it"
            )
        return form

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        if grid_thw is None:
            raise ContractError(
                "this model places rows by the patch grid, which the embedding lacks; send it as "
                "image_grid_thw"
            )
        frames, height, width = grid_thw
        cells = frames * height * width // self.merge_size**2
        if frames != 1 or height % self.merge_size or width % self.merge_size:
            raise ContractError(
                f"the grid of an image is 1 x height x width with both a multiple of "
                f"{self.merge_size}, the embedding states {grid_thw}"
            )
        if cells != row_count:
            raise ContractError(
                f"the grid {grid_thw} has {cells} rows, the embedding has {row_count}"
            )
        return self._form(grid_thw)

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        budget = self._budget(options)
        if budget == self.checkpoint:
            return {}
        return {"size": {"shortest_edge": budget.least, "longest_edge": budget.most}}

    @property
    def _cell(self) -> int:
        return self.patch_size * self.merge_size

    def _form(self, grid: Grid) -> ImageForm:
        rows = prod(grid) // self.merge_size**2
        return ImageForm(rows, (rows,), grid)

    def _budget(self, options: PixelOptions) -> Budget:
        base = self.checkpoint
        most = base.most
        if options.detail == "low":
            low = min(_LOW_PIXELS * self.frames, most // _LOW_SHARE)
            most = max(base.least, low, self._cell**2 * self.frames)
        most = self._bounded("max_pixels", options.max_pixels, most)
        least = self._bounded("min_pixels", options.min_pixels, min(base.least, most))
        if least > most:
            raise ContractError(
                f"min_pixels is {least // self.frames} and above max_pixels, "
                f"{most // self.frames}; lower it",
                "min_pixels",
            )
        return Budget(least, most)

    def _bounded(self, name: str, asked: int | None, otherwise: int) -> int:
        if asked is None:
            return otherwise
        least, most = self._cell**2, self.checkpoint.most // self.frames
        if not least <= asked <= most:
            raise ContractError(
                f"{name} runs from {least} to {most} for this model, but {asked} came", name
            )
        return asked * self.frames


def qwen_rows(image_processor: Any) -> GridRows:
    """The rule that a Qwen2-VL image processor's settings give."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    def resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
        scaled: tuple[int, int] = smart_resize(
            height, width, factor, min_pixels=least, max_pixels=most
        )
        return scaled

    size = image_processor.size
    budget = Budget(int(size["shortest_edge"]), int(size["longest_edge"]))
    return GridRows(image_processor.patch_size, image_processor.merge_size, budget, resize)
