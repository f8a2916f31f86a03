"""Rows of the families that encode a picture whole and in tiles, and cut the padding away.

LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/) and LLaVA-OneVision
(https://arxiv.org/abs/2408.03326, section 3.2).
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

from chiasm.models.contract import (
    ContractError,
    Grid,
    ImageForm,
    PixelOptions,
    Size,
    fixed_pixels,
    of_stated_size,
)

# Above this share over the limit OneVision scales the tiles' rows down.
_TOLERANCE = 1.1


@dataclass(frozen=True)
class TiledRows:
    """Rows of the whole picture, then of its tiles, a newline's row after each line of these.

    Attributes:
        pinpoints: (height, width) in pixels of the canvases that tiles may make.
        tile: pixels of a tile's side.
        patches: patches of a tile's side.
        most_tiles: rows of more tiles are scaled down to so many; None is no limit.
    """

    pinpoints: tuple[Size, ...]
    tile: int
    patches: int
    most_tiles: int | None = None

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        return self._form(size)

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        return of_stated_size(self._form, row_count, grid_thw, size)

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return fixed_pixels(options)

    def _form(self, size: Size) -> ImageForm:
        lines, columns = self._scaled(*self._unpadded(size))
        rows = self.patches**2 + lines * (columns + 1)
        return ImageForm(rows, (rows,))

    def _unpadded(self, size: Size) -> tuple[int, int]:
        """Lines and columns of the tiles' rows that show the picture and not its padding."""
        from transformers.image_processing_utils import select_best_resolution

        canvas = select_best_resolution(size, list(self.pinpoints))
        if canvas is None:
            raise ContractError(f"the model has no canvas for an image of {size[0]} x {size[1]}")
        lines, columns = (side // self.tile * self.patches for side in canvas)
        height, width = size
        if width / height > columns / lines:
            shown = int(round(height * (columns / width), 7))
            return lines - (lines - shown) // 2 * 2, columns
        shown = int(round(width * (lines / height), 7))
        return lines, columns - (columns - shown) // 2 * 2

    def _scaled(self, lines: int, columns: int) -> tuple[int, int]:
        if self.most_tiles is None:
            return lines, columns
        ratio = sqrt(lines * columns / (self.most_tiles * self.patches**2))
        if ratio <= _TOLERANCE:
            return lines, columns
        return int(lines // ratio), int(columns // ratio)


def tiled_rows(sources: Any, most_tiles: int | None = None) -> TiledRows:
    """The rule that a config and its image processor give."""
    vision = sources.config.vision_config
    return TiledRows(
        pinpoints=tuple((h, w) for h, w in sources.image_processor.image_grid_pinpoints),
        tile=vision.image_size,
        patches=vision.image_size // vision.patch_size,
        most_tiles=most_tiles,
    )


def wrong_strategy(config: Any) -> str | None:
    """A tower's class token has no place among tiles; where it has one, it must be dropped."""
    has_class_token = config.vision_config.model_type == "clip_vision_model"
    expected = "default" if has_class_token else "full"
    if config.vision_feature_select_strategy != expected:
        return f"its vision_feature_select_strategy must be {expected!r} for its tower"
    return None
