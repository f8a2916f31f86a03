"""MiniCPM-V 4.6: a picture whole and, if large, in slices; a decoder with recurrent layers."""

from dataclasses import dataclass
from typing import Any

from chiasm.models.contract import (
    Grid,
    ImageForm,
    Mark,
    Piece,
    PixelOptions,
    Size,
    fixed_pixels,
    of_stated_size,
)
from chiasm.models.families.names import token, under
from chiasm.models.family import Family, Sources, stateful


@dataclass(frozen=True)
class Wrap:
    """A start and an end token."""

    start: str
    end: str

    def around(self, *pieces: Piece) -> tuple[Piece, ...]:
        return (self.start, *pieces, self.end)


@dataclass(frozen=True)
class SlicedRows:
    """Rows of the whole picture, then of each slice, line by line.

    Attributes:
        processor: transformers' image processor, asked for sizes only.
        number: around the picture's number; None if the checkpoint numbers none.
    """

    processor: Any
    number: Wrap | None
    picture: Wrap
    slice: Wrap

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        one = self.processor
        lines = one.get_sliced_grid(size, one.max_slice_nums, one.scale_resolution)
        lines = lines if one.slice_mode else None
        settings = (one.scale_resolution, one.patch_size, one.downsample_mode)
        whole = self._rows(one.find_best_resize(size, *settings, allow_upscale=lines is None))
        text: tuple[Piece, ...] = self.picture.around(whole)
        if self.number is not None:
            text = (*self.number.around(Mark.NUMBER), *text)
        if lines is None:
            return ImageForm(whole, text)
        down, across = lines
        height, width = one.get_refine_size(size, lines, *settings, allow_upscale=True)
        each = self._rows((height // down, width // across))
        line = self.slice.around(each) * across
        slices = (*line, *(("\n", *line) * (down - 1)))
        return ImageForm(whole + each * down * across, (*text, *slices))

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        return of_stated_size(
            lambda known: self.of_size(known, PixelOptions()), row_count, grid_thw, size
        )

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return fixed_pixels(options)

    def _rows(self, size: tuple[int, int]) -> int:
        patch = self.processor.patch_size
        merged = 4 if self.processor.downsample_mode == "4x" else 16
        return int((size[0] // patch) * (size[1] // patch) // merged)


def refusal(config: Any) -> str | None:
    if config.merger_times != 1 or tuple(config.merge_kernel_size) != (2, 2):
        return "it merges rows otherwise than once two by two, which is not supported"
    return None


def image_rule(sources: Sources) -> SlicedRows:
    def wrap(name: str, published: str) -> Wrap:
        return Wrap(
            token(sources, f"{name}_start_token", f"<{published}>"),
            token(sources, f"{name}_end_token", f"</{published}>"),
        )

    stated = sources.processor.get("use_image_id")
    numbered = sources.image_processor.use_image_id if stated is None else stated
    return SlicedRows(
        processor=sources.image_processor,
        number=wrap("image_id", "image_id") if numbered else None,
        picture=wrap("image", "image"),
        slice=wrap("slice", "slice"),
    )


FAMILY = Family(
    model_type="minicpmv4_6",
    title="MiniCPM-V 4.6",
    vision_modules=("model.vision_tower", "model.merger"),
    language_modules=("model.language_model", "lm_head"),
    width_tensor="merger.mlp.0.linear_2.weight",
    settings=(
        "vision_config",
        "insert_layer_id",
        "drop_vision_last_layer",
        "downsample_mode",
    ),
    vision_tensor_name=under("vision_tower", "merger"),
    refusal=refusal,
    image_rule=image_rule,
    layers=stateful,
    needs=("image_size",),
)
