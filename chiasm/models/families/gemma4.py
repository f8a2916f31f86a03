"""Gemma 4: pictures of any shape on a budget of patches, pooled; rows of one see each other."""

from dataclasses import dataclass
from typing import Any

from chiasm.models.contract import (
    ContractError,
    Grid,
    ImageForm,
    PixelOptions,
    Size,
    fixed_pixels,
    no_grid,
)
from chiasm.models.families.names import token, under
from chiasm.models.family import Family, Sources, stateful


@dataclass(frozen=True)
class PooledRows:
    """A row for each `pooling` x `pooling` patches, as many as `most` allows for the shape.

    Attributes:
        patch_size, pooling: edges, of a patch in pixels and of a pool in patches.
        most: rows of an image at most.
        before, after: text around the image tokens.
    """

    patch_size: int
    pooling: int
    most: int
    before: str
    after: str

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        fixed_pixels(options)
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )

        try:
            height, width = get_aspect_ratio_preserving_size(
                *size, self.patch_size, self.most * self.pooling**2, self.pooling
            )
        except ValueError as error:
            raise ContractError(
                f"the image has {size[0]} x {size[1]} pixels (height x width), which the model "
                "cannot scale: one side is too long for the other; crop it"
            ) from error
        cell = self.patch_size * self.pooling
        return self._form((height // cell) * (width // cell))

    def of_rows(self, row_count: int, grid_thw: Grid | None, size: Size | None) -> ImageForm:
        no_grid(grid_thw)
        if row_count > self.most:
            raise ContractError(
                f"an image of this model has at most {self.most} rows, the embedding has "
                f"{row_count}"
            )
        return self._form(row_count)

    def processor_options(self, options: PixelOptions) -> dict[str, Any]:
        return fixed_pixels(options)

    def _form(self, row_count: int) -> ImageForm:
        return ImageForm(row_count, (self.before, row_count, self.after))


def refusal(config: Any) -> str | None:
    return "it has no vision tower" if config.vision_config is None else None


def image_rule(sources: Sources) -> PooledRows:
    processor = sources.image_processor
    return PooledRows(
        patch_size=processor.patch_size,
        pooling=processor.pooling_kernel_size,
        most=processor.max_soft_tokens,
        before=token(sources, "boi_token", "<|image>"),
        after=token(sources, "eoi_token", "<image|>"),
    )


FAMILY = Family(
    model_type="gemma4",
    title="Gemma 4",
    vision_modules=(
        "model.vision_tower",
        "model.embed_vision",
        "model.audio_tower",
        "model.embed_audio",
    ),
    language_modules=(
        "model.language_model",
        "lm_head",
        "model.audio_tower",
        "model.embed_audio",
    ),
    width_tensor="embed_vision.embedding_projection.weight",
    settings=("vision_config",),
    vision_tensor_name=under("vision_tower", "embed_vision"),
    refusal=refusal,
    image_rule=image_rule,
    layers=stateful,
)
