"""The pictures of a request: their sizes before encoding, and their rows, fetched in parallel."""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from chiasm.errors import ChiasmError, Reason, sentence, within
from chiasm.images import ImageError, ImageLimits, image_size
from chiasm.models.contract import (
    ContractError,
    ImageContract,
    ImageForm,
    PixelOptions,
    Size,
)
from chiasm.tracing import names, spans
from chiasm.v1 import llm_service_pb2
from llm_service import traces
from llm_service.embeddings import Rows, check_embedding
from llm_service.references import References
from llm_service.request import CallerEmbedding, Picture, RawImage, Reference
from llm_service.vision.local import image_fault
from llm_service.vision.source import Asked, Fetched, Sought, VisionSource

_S = llm_service_pb2
_SOURCES = {
    "cache": _S.IMAGE_SOURCE_CACHE,
    "remote": _S.IMAGE_SOURCE_REMOTE,
    "local": _S.IMAGE_SOURCE_LOCAL,
}


@dataclass(frozen=True, eq=False)
class Measured:
    """A picture before encoding: what stands for it; rows if they were sent or are held."""

    picture: Picture
    form: ImageForm
    rows: Rows | None
    # SHA-256 of the file of a raw picture.
    digest: bytes = b""


@dataclass(frozen=True, eq=False)
class Ready:
    """A picture with its checked rows and the path that it took."""

    picture: Picture
    rows: Rows
    source: "llm_service_pb2.ImageSource.ValueType"
    encoder_name: str = ""
    encoder_cache_hit: bool = False
    encode_seconds: float = 0.0
    fetch_seconds: float = 0.0

    def path(self) -> llm_service_pb2.ImagePath:
        return llm_service_pb2.ImagePath(
            message_index=self.picture.message_index,
            part_index=self.picture.part_index,
            source=self.source,
            encoder_name=self.encoder_name,
            placeholder_count=self.rows.form.row_count,
            identity_checked=self.rows.identity_checked,
            encoder_cache_hit=self.encoder_cache_hit,
        )


class PictureReader:
    """Measures, checks and fetches the pictures of requests; heavy work runs in `workers`."""

    def __init__(
        self,
        contract: ImageContract,
        limits: ImageLimits,
        max_request_pixels: int,
        vision: VisionSource,
        references: References,
        workers: Executor,
    ) -> None:
        self._contract = contract
        self._limits = limits
        self._max_request_pixels = max_request_pixels
        self._vision = vision
        self._references = references
        self._workers = workers

    async def measure(self, pictures: Sequence[Picture], tenant: str) -> list[Measured]:
        """Prompt tokens of each picture, from headers and the contract; nothing is decoded."""
        if not pictures:
            return []
        whole = self._references.whole(pictures)
        held = await self._references.look_up(whole, tenant)
        loop = asyncio.get_running_loop()
        measured = await loop.run_in_executor(self._workers, self._measure, whole, held)
        await self._references.check(whole, [one.rows for one in measured], tenant)
        return measured

    async def fetch(self, measured: Sequence[Measured], asked: Asked) -> list[Ready]:
        """The rows of all pictures. The first failure ends the others."""
        if not measured:
            return []
        with spans.stage(names.VISION, {names.IMAGE_COUNT: len(measured)}):
            return await self._fetch_all(measured, asked)

    async def _fetch_all(self, measured: Sequence[Measured], asked: Asked) -> list[Ready]:
        tasks: list[asyncio.Task[Ready]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._traced(index, one, asked))
                    for index, one in enumerate(measured)
                ]
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        ready = [task.result() for task in tasks]
        await self._references.record(
            [one.picture for one in ready], [one.rows for one in ready], asked.tenant
        )
        return ready

    def _measure(self, pictures: Sequence[Picture], held: Sequence[Rows | None]) -> list[Measured]:
        measured: list[Measured] = []
        pixels = 0
        for picture, rows in zip(pictures, held, strict=True):
            if rows is not None:
                measured.append(Measured(picture, rows.form, rows))
                continue
            with within(picture.place):
                if isinstance(picture.content, CallerEmbedding):
                    rows = check_embedding(picture.content, self._contract)
                    rows = rows.named(self._contract.expected_identity)
                    measured.append(Measured(picture, rows.form, rows))
                    continue
                assert isinstance(picture.content, RawImage)
                height, width = self._size(picture.content)
                form = self._form((height, width), picture.content.options)
            pixels += height * width
            self._check_pixels(pixels, picture)
            digest = hashlib.sha256(picture.content.data).digest()
            measured.append(Measured(picture, form, None, digest))
        return measured

    def _size(self, image: RawImage) -> tuple[int, int]:
        try:
            width, height = image_size(image.data, self._limits)
        except ImageError as error:
            raise image_fault(error) from error
        return height, width

    def _form(self, size: Size, options: PixelOptions) -> ImageForm:
        try:
            return self._contract.of_size(size, options)
        except ContractError as error:
            # Of pictures within the limits a model refuses none but those with too short a side.
            field, code = "data", "image_too_small"
            if error.option is not None:
                field, code = f"options.{error.option}", "invalid_value"
            raise ChiasmError(
                Reason.IMAGE_INVALID, sentence(error.message), field, metadata={"code": code}
            ) from error

    def _check_pixels(self, pixels: int, picture: Picture) -> None:
        if pixels > self._max_request_pixels:
            raise ChiasmError(
                Reason.IMAGE_TOO_LARGE,
                f"The pictures of a request may have {self._max_request_pixels} pixels together; "
                "send smaller or fewer ones.",
                picture.place,
                metadata={"code": "image_too_large"},
            )

    async def _traced(self, index: int, measured: Measured, asked: Asked) -> Ready:
        with spans.stage(names.PICTURE, {names.IMAGE_INDEX: index}) as span:
            ready = await self._fetch(measured, asked)
            if span.recording:
                span.put(traces.of_picture(ready.path()))
            return ready

    async def _fetch(self, measured: Measured, asked: Asked) -> Ready:
        picture, content = measured.picture, measured.picture.content
        if measured.rows is not None:
            held = isinstance(content, Reference)
            source = _S.IMAGE_SOURCE_REFERENCE if held else _S.IMAGE_SOURCE_CALLER
            return Ready(picture, measured.rows, source)
        assert isinstance(content, RawImage)
        sought = Sought(content, measured.digest, measured.form, asked)
        with within(picture.place):
            return _ready(picture, await self._vision.encode(sought))


def _ready(picture: Picture, fetched: Fetched) -> Ready:
    return Ready(
        picture=picture,
        rows=fetched.rows,
        source=_SOURCES[fetched.origin],
        encoder_name=fetched.encoder_name,
        encoder_cache_hit=fetched.encoder_cache_hit,
        encode_seconds=fetched.encode_seconds,
        fetch_seconds=fetched.fetch_seconds,
    )


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    told = failures.exceptions[0]
    return _first(told) if isinstance(told, BaseExceptionGroup) else told
