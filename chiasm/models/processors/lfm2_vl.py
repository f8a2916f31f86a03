"""LFM2-VL's image processor on PIL; transformers has only one that needs torchvision.

Sizes, tiles, padding and masks are those of transformers' `Lfm2VlImageProcessor`, setting by
setting. Pixels are scaled by PIL instead, which rounds otherwise: 2 grey levels at most were seen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

from chiasm.models.contract import ContractError, Size

Pixels = npt.NDArray[Any]
"""`[channels, height, width]`."""

_TILING: Final = (
    "downsample_factor",
    "min_tiles",
    "max_tiles",
    "use_thumbnail",
    "do_image_splitting",
    "min_image_tokens",
    "max_image_tokens",
    "encoder_patch_size",
    "tile_size",
    "max_pixels_tolerance",
)


@dataclass(frozen=True)
class Layout:
    """What becomes of one picture.

    Attributes:
        lines, columns: of tiles; 1 and 1 where the picture is not split.
        sizes: height and width of everything encoded, in order: tiles line by line, then the
            thumbnail, or the picture alone.
        scaled: height and width of the whole picture as one image, the thumbnail's where it is
            split.
    """

    lines: int
    columns: int
    sizes: tuple[Size, ...]
    scaled: Size


@dataclass(frozen=True)
class Tiling:
    """The settings that decide layouts, by the names of preprocessor_config.json.

    Lengths are in pixels; a token stands for `downsample_factor` x `downsample_factor` patches.
    """

    downsample_factor: int
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    do_image_splitting: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float

    def __post_init__(self) -> None:
        for name in _TILING:
            if name not in ("use_thumbnail", "do_image_splitting") and getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.do_image_splitting and self.min_tiles > self.max_tiles:
            raise ValueError(f"min_tiles {self.min_tiles} is above max_tiles {self.max_tiles}")
        if self.do_image_splitting and self.tile_size % self.cell:
            raise ValueError(
                f"tile_size {self.tile_size} is no multiple of {self.cell}, the edge of a token"
            )

    @property
    def cell(self) -> int:
        """The edge of what a token stands for, in pixels."""
        return self.encoder_patch_size * self.downsample_factor

    @property
    def most_patches(self) -> int:
        """To how many patches everything that is encoded is padded."""
        alone = self.max_image_tokens * self.downsample_factor**2
        tile = (self.tile_size // self.encoder_patch_size) ** 2 if self.do_image_splitting else 0
        return max(alone, tile)

    def layout(self, size: Size) -> Layout:
        """What becomes of a picture of `size`.

        Raises:
            ContractError: it is so thin that, scaled, it has more patches than the tower takes.
        """
        scaled = self.scaled(size)
        if not self._is_split(size):
            return self._checked(size, Layout(1, 1, (scaled,), scaled))
        lines, columns = self._grid(size)
        tiles = ((self.tile_size, self.tile_size),) * (lines * columns)
        whole = (scaled,) if self.use_thumbnail and len(tiles) > 1 else ()
        return self._checked(size, Layout(lines, columns, (*tiles, *whole), scaled))

    def scaled(self, size: Size) -> Size:
        """Whole cells, within the bounds of tokens where the shape allows it."""
        cell, pixels = self.cell, size[0] * size[1]
        height, width = (max(cell, self._nearest(side)) for side in size)
        least, most = (
            tokens * cell**2 for tokens in (self.min_image_tokens, self.max_image_tokens)
        )
        if height * width > most:
            shrink = sqrt(pixels / most)
            height, width = (max(cell, floor(side / shrink / cell) * cell) for side in size)
        elif height * width < least:
            grow = sqrt(least / pixels)
            height, width = (ceil(side * grow / cell) * cell for side in size)
        return height, width

    def _nearest(self, side: int) -> int:
        return round(side / self.cell) * self.cell

    def _is_split(self, size: Size) -> bool:
        if not self.do_image_splitting or self.min_tiles == self.max_tiles == 1:
            return False
        # A side may be taken for a patch here, but for no less than a cell when it is scaled.
        height, width = (max(self.encoder_patch_size, self._nearest(side)) for side in size)
        return height * width > self.max_image_tokens * self.cell**2 * self.max_pixels_tolerance

    def _grid(self, size: Size) -> tuple[int, int]:
        """Lines and columns nearest in shape; of equal ones the last that is not too large."""
        height, width = size
        best, best_gap = (1, 1), float("inf")
        for columns, lines in self._grids():
            gap = abs(width / height - columns / lines)
            filled = height * width > 0.5 * (self.tile_size**2 * columns * lines)
            if gap < best_gap or (gap == best_gap and filled):
                best, best_gap = (lines, columns), gap
        return best

    def _grids(self) -> list[tuple[int, int]]:
        """Columns and lines, by their product.

        The order among equal products decides ties of shape, so it is made as transformers makes
        it: sorted from a set of the same pairs put in at the same turns.
        """
        fitting = [
            (columns, lines)
            for most in range(self.min_tiles, self.max_tiles + 1)
            for columns in range(1, most + 1)
            for lines in range(1, most + 1)
            if self.min_tiles <= columns * lines <= self.max_tiles
        ]
        return sorted(set(fitting), key=lambda grid: grid[0] * grid[1])

    def _checked(self, size: Size, layout: Layout) -> Layout:
        most = max(height * width for height, width in layout.sizes) // self.encoder_patch_size**2
        if most > self.most_patches:
            raise ContractError(
                f"an image of {size[0]} x {size[1]} pixels (height x width) is too thin: scaled "
                f"it has {most} patches, this model takes {self.most_patches}; crop it or pad it"
            )
        return layout


class TilingKwargs(ImagesKwargs, total=False):
    """The settings that a checkpoint may state, besides those of every image processor."""

    downsample_factor: int
    do_image_splitting: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float
    return_row_col_info: bool


class Lfm2VlImageProcessorPil(PilBackend):
    """Pictures in, `pixel_values` float32 `[tiles, patches, patch pixels]` out, padded with zeros.

    Beside them `pixel_attention_mask` int32 `[tiles, patches]` and `spatial_shapes` int64
    `[tiles, 2]`: height and width in patches. The tiles of all pictures follow one another. With
    `return_row_col_info`, each picture's lines, columns and scaled size as well.
    """

    valid_kwargs = TilingKwargs
    size = SizeDict(height=512, width=512)
    resample = PILImageResampling.BILINEAR
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_pad = True
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    downsample_factor = 2
    do_image_splitting = True
    min_tiles = 2
    max_tiles = 10
    use_thumbnail = True
    min_image_tokens = 64
    max_image_tokens = 256
    encoder_patch_size = 16
    tile_size = 512
    max_pixels_tolerance = 2.0
    return_row_col_info = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]
        if not self.do_pad:
            raise ValueError("do_pad is false; the vision tower takes padded patches only")
        self.tiling()

    def tiling(self, **chosen: Any) -> Tiling:
        """The settings of layouts, `chosen` before the checkpoint's; `ValueError` for bad ones."""
        return Tiling(**{name: chosen.get(name, getattr(self, name)) for name in _TILING})

    def _preprocess(  # type: ignore[override]  # called by name with every setting
        self,
        images: Sequence[Pixels],
        return_tensors: Any = None,
        return_row_col_info: bool = False,
        **settings: Any,
    ) -> BatchFeature:
        tiling = self.tiling(**settings)
        layouts = [tiling.layout((image.shape[-2], image.shape[-1])) for image in images]
        patches = [
            self._patches(piece, tiling.encoder_patch_size, settings)
            for image, layout in zip(images, layouts, strict=True)
            for piece in self._pieces(image, layout, tiling.tile_size, settings["resample"])
        ]
        data: dict[str, Any] = {
            "pixel_values": np.stack([_padded(one, tiling.most_patches) for one in patches]),
            "pixel_attention_mask": _mask(patches, tiling.most_patches),
            "spatial_shapes": _shapes(layouts, tiling.encoder_patch_size),
        }
        if return_row_col_info:
            data["image_rows"] = [layout.lines for layout in layouts]
            data["image_cols"] = [layout.columns for layout in layouts]
            data["image_sizes"] = [list(layout.scaled) for layout in layouts]
        return BatchFeature(data=data, tensor_type=return_tensors)

    def _pieces(self, image: Pixels, layout: Layout, tile: int, resample: Any) -> Iterator[Pixels]:
        tile_count = layout.lines * layout.columns
        if tile_count == 1:
            yield self._scaled(image, layout.sizes[0], resample)
            return
        whole = self._scaled(image, (tile * layout.lines, tile * layout.columns), resample)
        for line in range(layout.lines):
            for column in range(layout.columns):
                down, across = line * tile, column * tile
                yield whole[:, down : down + tile, across : across + tile]
        if len(layout.sizes) > tile_count:
            yield self._scaled(image, layout.scaled, resample)

    def _scaled(self, image: Pixels, size: Size, resample: Any) -> Pixels:
        height, width = size
        scaled: Pixels = self.resize(image, SizeDict(height=height, width=width), resample=resample)
        return scaled

    def _patches(self, piece: Pixels, edge: int, settings: Mapping[str, Any]) -> Pixels:
        """Patches line by line, `[patches, edge * edge * channels]`, channels innermost."""
        if settings["do_rescale"]:
            piece = self.rescale(piece, settings["rescale_factor"])
        if settings["do_normalize"]:
            piece = self.normalize(piece, settings["image_mean"], settings["image_std"])
        channels, height, width = piece.shape
        cut = piece.reshape(channels, height // edge, edge, width // edge, edge)
        return cut.transpose(1, 3, 2, 4, 0).reshape(-1, edge * edge * channels)


def _padded(patches: Pixels, length: int) -> Pixels:
    return np.pad(patches, ((0, length - len(patches)), (0, 0)))


def _mask(patches: Sequence[Pixels], length: int) -> Pixels:
    return np.stack([np.arange(length) < len(one) for one in patches]).astype(np.int32)


def _shapes(layouts: Sequence[Layout], edge: int) -> Pixels:
    sizes = [size for layout in layouts for size in layout.sizes]
    return np.array(sizes, dtype=np.int64) // edge
