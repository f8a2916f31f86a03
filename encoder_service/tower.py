"""What the batcher needs of a vision half, and how the failures of one picture are told."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import PIL.Image

from chiasm.errors import ChiasmError, Reason, sentence
from chiasm.images import ImageError, ImageLimits, decode_image, image_size
from chiasm.models.contract import ContractError, ImageContract, PixelOptions
from chiasm.models.vision import ImageFeatures, ImageShapeError, PixelInputs
from chiasm.torch_tensors import all_finite

IMAGE_DATA = "image.data"

Outcome = ImageFeatures | Exception
"""What a forward gave for one picture."""


class Tower(Protocol):
    """A vision half: `chiasm.models.vision.VisionHalf` is one."""

    @property
    def contract(self) -> ImageContract:
        """What the model says about its embeddings."""
        ...

    def preprocess(self, image: PIL.Image.Image, options: PixelOptions) -> PixelInputs:
        """One upright RGB image for the tower; called from many threads at once."""
        ...

    def encode(self, batch: Sequence[PixelInputs], *, bit_exact: bool) -> list[ImageFeatures]:
        """The features of each image in order; called from one thread."""
        ...


@dataclass(frozen=True)
class Measure:
    """What the header of a picture says: pixels of the file, feature rows that it will have."""

    pixel_count: int
    row_count: int


def measure(tower: Tower, limits: ImageLimits, data: memoryview, options: PixelOptions) -> Measure:
    """Reads no pixels. Raises ChiasmError for what is wrong with the header or the options."""
    with _told():
        width, height = image_size(data, limits)
        form = tower.contract.of_size((height, width), options)
        return Measure(width * height, form.row_count)


def prepare(
    tower: Tower, limits: ImageLimits, data: memoryview, options: PixelOptions
) -> PixelInputs:
    """Picture file -> what the tower takes. Raises ChiasmError for whatever is wrong with it."""
    with _told():
        return tower.preprocess(decode_image(data, limits), options)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        raise refusal(Reason(error.reason), error.message, error.code) from error
    except (ImageShapeError, ContractError) as error:
        if error.option is not None:
            field = f"image.options.{error.option}"
            raise ChiasmError(Reason.IMAGE_INVALID, sentence(error.message), field) from error
        raise refusal(Reason.IMAGE_INVALID, error.message, "image_parse_error") from error


def forward(tower: Tower, batch: Sequence[PixelInputs], bit_exact: bool) -> list[Outcome]:
    """The outcome of each picture. If the batch fails each goes alone, so one spoils none."""
    try:
        encoded = tower.encode(batch, bit_exact=bit_exact)
        return [_finite(features) for features in encoded]
    except Exception as error:
        if len(batch) == 1:
            return [error]
        return [forward(tower, [pixels], bit_exact)[0] for pixels in batch]


def refusal(reason: Reason, message: str, code: str) -> ChiasmError:
    """A picture that is not served; `code` is OpenAI's name of the fault, for the gateway."""
    return ChiasmError(reason, message, IMAGE_DATA, metadata={"code": code})


def _finite(features: ImageFeatures) -> Outcome:
    if all(map(all_finite, (features.rows, *features.levels))):
        return features
    return ChiasmError(
        Reason.INTERNAL,
        "The tower computed values that are not finite for this image; no other is affected.",
        IMAGE_DATA,
    )
