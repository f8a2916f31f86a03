"""The local vision source: the vision half in this process, off the event loop."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

from chiasm.errors import ChiasmError, Reason
from chiasm.images import ImageError, ImageLimits, decode_image
from chiasm.models.contract import ImageForm
from chiasm.models.vision import ImageFeatures, ImageShapeError, PixelInputs, VisionHalf
from chiasm.tracing import names, spans
from llm_service.embeddings import Rows, check_finite
from llm_service.request import RawImage
from llm_service.vision.source import Fetched, Sought

_RETRY_SECONDS = 1.0


class LocalTower:
    """Decodes and prepares pictures in `workers`, runs the tower on a thread of its own."""

    def __init__(self, half: VisionHalf, limits: ImageLimits, workers: Executor, most: int) -> None:
        """`most` pictures may be in work at once; one more is refused with QUEUE_FULL."""
        self._most = most
        self._waiting = 0
        self._half = half
        self._limits = limits
        self._workers = workers
        self._tower = ThreadPoolExecutor(1, "tower")

    async def encode(self, sought: Sought) -> Fetched:
        began = time.monotonic()
        with self._admitted():
            features = await self._features(sought)
        rows = self._checked(features, sought.form)
        seconds = time.monotonic() - began
        return Fetched(rows, "local", fetch_seconds=seconds, encode_seconds=seconds)

    async def close(self) -> None:
        self._tower.shutdown(wait=False, cancel_futures=True)

    async def _features(self, sought: Sought) -> ImageFeatures:
        loop = asyncio.get_running_loop()
        with spans.stage(names.DECODE_IMAGE):
            pixels = await loop.run_in_executor(self._workers, self._prepare, sought.image)
        with spans.stage(names.TOWER):
            return await loop.run_in_executor(
                self._tower, self._forward, pixels, sought.asked.deadline
            )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._waiting >= self._most:
            raise ChiasmError(
                Reason.QUEUE_FULL,
                f"{self._waiting} pictures wait for the tower and at most {self._most} may; try "
                "again later.",
                retry_after=_RETRY_SECONDS,
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _checked(self, features: ImageFeatures, expected: ImageForm) -> Rows:
        for part in (features.rows, *features.levels):
            check_finite(part)
        form = self._half.contract.of_rows(
            len(features.rows), features.grid_thw, features.image_size
        )
        if form != expected:
            raise ChiasmError(
                Reason.INTERNAL,
                f"The tower gave {form.row_count} rows, the prompt has room for "
                f"{expected.row_count}.",
            )
        return Rows(
            features.rows,
            form,
            identity_checked=True,
            levels=features.levels,
            image_size=features.image_size,
        )

    def _prepare(self, image: RawImage) -> PixelInputs:
        try:
            picture = decode_image(image.data, self._limits)
            return self._half.preprocess(picture, image.options)
        except ImageError as error:
            raise image_fault(error) from error
        except ImageShapeError as error:
            raise ChiasmError(Reason.IMAGE_INVALID, error.message, "data") from error

    def _forward(self, pixels: PixelInputs, deadline: float) -> ImageFeatures:
        if time.monotonic() > deadline:
            raise ChiasmError(Reason.DEADLINE, "The deadline passed before the tower was free.")
        (features,) = self._half.encode([pixels])
        return features


def image_fault(error: ImageError) -> ChiasmError:
    """The error of a picture that cannot be decoded, with its OpenAI image code."""
    return ChiasmError(Reason(error.reason), error.message, "data", metadata={"code": error.code})
