"""The vision half of a checkpoint: from an upright RGB image to the rows the decoder takes.

`preprocess` may run in any thread, many at once. `encode` runs the tower and is serialised; call it
from one worker thread, never from an event loop.
"""

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import PIL.Image
import torch
from transformers import PreTrainedConfig

from chiasm import colours
from chiasm.models.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from chiasm.models.contract import (
    DEFAULT_OPTIONS,
    ContractError,
    Grid,
    ImageContract,
    PixelOptions,
    Size,
)
from chiasm.models.families import family_of
from chiasm.models.half import brief, load_config, load_half
from chiasm.models.identity import EncoderIdentity, feature_type, identity_of
from chiasm.models.sources import read_sources

MAX_ASPECT_RATIO = 200
"""Scaling the short edge of a thinner image up to the tower's size would cost gigabytes."""

# Height and width of the two pictures that prove a tower.
_PROOF_SIZES = ((32, 48), (48, 32))
# Where a processor gives these, it lays an image's tiles side by side: images do not stack.
_PACKED = "target_sizes"
# Pixels of an edge, for towers that state none: work is counted in patches of this size.
_USUAL_PATCH_SIZE = 14


class ImageShapeError(ValueError):
    """An image or option that the tower cannot take; `message` says why, `option` which option."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.option = option


@dataclass(frozen=True)
class PixelInputs:
    """One image, ready for the tower.

    Attributes:
        tensors: what the tower consumes, by name, each with a leading extent for the image's tiles.
        patch_count: the work, in patches of the tower; what a batch's budget counts.
        placeholder_count: tokens the image will take in the prompt.
        grid_thw: patch grid, for families that have one.
        image_size: height and width in pixels as given.
    """

    tensors: Mapping[str, torch.Tensor]
    patch_count: int
    placeholder_count: int
    grid_thw: Grid | None
    image_size: Size


@dataclass(frozen=True)
class ImageFeatures:
    """One encoded image.

    Attributes:
        rows: `[row_count, width]`, contiguous, on the CPU, in the half's dtype.
        levels: extra levels of the families that have them, each shaped as `rows`.
        placeholder_count: tokens the image takes in the prompt.
        grid_thw: patch grid, for families that have one.
        image_size: height and width in pixels as given.
    """

    rows: torch.Tensor
    levels: tuple[torch.Tensor, ...]
    placeholder_count: int
    grid_thw: Grid | None
    image_size: Size

    @property
    def byte_count(self) -> int:
        """Bytes of the rows and of all levels."""
        return self.rows.nbytes + sum(level.nbytes for level in self.levels)


class VisionHalf:
    """Tower and projector of one checkpoint, with its image processor."""

    def __init__(
        self, model: Any, processor: Any, contract: ImageContract, patch_size: int
    ) -> None:
        self.model = model
        self.contract = contract
        self._processor = processor
        self._patch_size = patch_size
        self._one_at_a_time = threading.Lock()
        self._consumed = frozenset(
            inspect.signature(model.base_model.get_image_features).parameters
        )

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        model_id: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        background: str = colours.WHITE,
    ) -> Self:
        """Load tower and projector only; the language half never touches memory.

        `background` is the colour over which its callers decode pictures, `#rrggbb`.

        Takes two small images of different shape through processor and tower before returning,
        so a checkpoint whose two disagree is refused here and not by the first caller.

        Raises:
            CheckpointError: the directory is incomplete, damaged or of a family that is not served.
        """
        checkpoint = open_checkpoint(directory)
        family = family_of(checkpoint.model_type)
        kind = feature_type(str(dtype).removeprefix("torch."))
        identity = identity_of(checkpoint, kind, model_id, background)
        config = load_config(checkpoint, family)
        sources = read_sources(checkpoint, config)
        model = load_half(checkpoint, config, family.language_modules, dtype, device)
        contract = family.contract(sources, identity)
        half = cls(model, sources.image_processor, contract, _patch_size(config))
        half._prove(checkpoint)
        return half

    @property
    def identity(self) -> EncoderIdentity:
        return self.contract.expected_identity

    def preprocess(
        self, image: PIL.Image.Image, options: PixelOptions = DEFAULT_OPTIONS
    ) -> PixelInputs:
        """Scale, crop and normalise one upright RGB image as the checkpoint's processor says.

        Raises:
            ImageShapeError: the image is not RGB, thinner than `MAX_ASPECT_RATIO` allows, or what
                the model does not take; or an option that the family lacks.
        """
        _check_image(image)
        size = (image.height, image.width)
        try:
            form = self.contract.of_size(size, options)
            chosen = self.contract.rule.processor_options(options)
        except ContractError as error:
            raise ImageShapeError(error.message, error.option) from error
        prepared = self._processor(images=image, return_tensors="pt", **chosen)
        tensors = {name: prepared[name] for name in prepared if name in self._consumed}
        return PixelInputs(
            tensors=tensors,
            patch_count=_patch_count(tensors["pixel_values"], self._patch_size),
            placeholder_count=form.row_count,
            grid_thw=_grid(tensors),
            image_size=size,
        )

    def encode(
        self, batch: Sequence[PixelInputs], *, bit_exact: bool = True
    ) -> list[ImageFeatures]:
        """Encode images, in the order given.

        With `bit_exact` each image has a forward of its own, so that its rows do not depend on its
        batch mates in any bit. Without it, neighbours of equal shape share one forward: matrix
        products of another shape may be summed in another order (in float32 a difference of about
        1e-6 was seen, with several threads only).
        """
        with self._one_at_a_time, torch.no_grad():
            return [
                feature
                for group in _forwards(batch, bit_exact)
                for feature in self._encode_together(group)
            ]

    def _encode_together(self, group: Sequence[PixelInputs]) -> Iterator[ImageFeatures]:
        output = self.model.get_image_features(
            **{name: self._stacked(name, group) for name in group[0].tensors}, return_dict=True
        )
        counts = [pixels.placeholder_count for pixels in group]
        pooled = _per_image(output.pooler_output, counts)
        levels = [
            _per_image(level, counts) for level in getattr(output, "deepstack_features", None) or ()
        ]
        for place, pixels in enumerate(group):
            yield self._features(pixels, pooled[place], [level[place] for level in levels])

    def _stacked(self, name: str, group: Sequence[PixelInputs]) -> torch.Tensor:
        tensor = torch.cat([pixels.tensors[name] for pixels in group])
        dtype = self.model.dtype if tensor.is_floating_point() else tensor.dtype
        moved: torch.Tensor = tensor.to(device=self.model.device, dtype=dtype)
        return moved

    def _features(
        self, pixels: PixelInputs, rows: torch.Tensor, levels: Iterable[torch.Tensor]
    ) -> ImageFeatures:
        return ImageFeatures(
            rows=_owned(rows),
            levels=tuple(_owned(level) for level in levels),
            placeholder_count=pixels.placeholder_count,
            grid_thw=pixels.grid_thw,
            image_size=pixels.image_size,
        )

    def _prove(self, checkpoint: Checkpoint) -> None:
        try:
            wide, tall = (self.preprocess(PIL.Image.new("RGB", size)) for size in _PROOF_SIZES)
            self.encode([wide])
            # Where every picture becomes one size the second forward would be the first again.
            if _shapes(tall) != _shapes(wide):
                self.encode([tall])
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint.directory}: the image processor's output does not fit the vision "
                f"tower ({brief(error)}); take both of one checkpoint"
            ) from error


def _patch_size(config: PreTrainedConfig) -> int:
    side = getattr(config.vision_config, "patch_size", _USUAL_PATCH_SIZE)
    return int(side[0] if isinstance(side, list | tuple) else side)


def _check_image(image: PIL.Image.Image) -> None:
    if image.mode != "RGB":
        raise ImageShapeError(
            f"an image is encoded as RGB, this one is {image.mode}; convert it first"
        )
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise ImageShapeError(
            f"the image has {image.height} x {image.width} pixels (height x width); its long side "
            f"may be at most {MAX_ASPECT_RATIO} times the short one"
        )


def _patch_count(pixels: torch.Tensor, patch_size: int) -> int:
    channels = 3
    return max(1, pixels.numel() // (channels * patch_size * patch_size))


def _grid(tensors: Mapping[str, torch.Tensor]) -> Grid | None:
    if "image_grid_thw" not in tensors:
        return None
    frames, height, width = (int(extent) for extent in tensors["image_grid_thw"][0])
    return frames, height, width


def _forwards(batch: Sequence[PixelInputs], bit_exact: bool) -> Iterator[Sequence[PixelInputs]]:
    if bit_exact or any(_PACKED in pixels.tensors for pixels in batch):
        return iter([[pixels] for pixels in batch])
    return (list(group) for _, group in groupby(batch, key=_shapes))


def _shapes(pixels: PixelInputs) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((name, tuple(tensor.shape)) for name, tensor in pixels.tensors.items())


def _per_image(pooled: Any, counts: Sequence[int]) -> list[torch.Tensor]:
    """`[rows, width]` of each image, from whichever container the family returns."""
    pieces = [pooled] if isinstance(pooled, torch.Tensor) else list(pooled)
    flat = torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
    if len(flat) != sum(counts):
        raise ContractError(f"the tower gave {len(flat)} rows for images that have {counts}")
    return list(flat.split_with_sizes(list(counts)))


def _owned(rows: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own, so that a cached image does not keep its batch alive."""
    return rows.detach().to("cpu").contiguous().clone()
