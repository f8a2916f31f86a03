"""The walk of a call: read, check the identity, find or compute the features, answer."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import chiasm
from chiasm.embedding_cache import embedding_key
from chiasm.errors import ChiasmError, Reason
from chiasm.images import ImageLimits
from chiasm.models.contract import ImageContract
from chiasm.rpc.embedding_stream import send_embedding
from chiasm.rpc.server import Call, Service, StreamMethod, UnaryMethod
from chiasm.tracing import names, spans
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.wire import Wired, plain
from encoder_service import messages
from encoder_service.batcher import Load
from encoder_service.messages import Answer, Picture
from encoder_service.metrics import EncoderMetrics
from encoder_service.single_flight import Obtained, SingleFlight

# Above this many bytes a digest is computed off the event loop.
_SMALL = 256 * 1024


@dataclass(frozen=True)
class Loaded:
    """What the service has once its checkpoint is loaded."""

    contract: ImageContract
    family: str
    flights: SingleFlight
    load: Load
    encoder_name: str


class EncoderServicer:
    """The methods of `chiasm.v1.EncoderService`. Until `open` they answer NOT_READY."""

    def __init__(
        self, limits: ImageLimits, metrics: EncoderMetrics, is_draining: Callable[[], bool]
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._is_draining = is_draining
        self._loaded: Loaded | None = None
        self._active = 0

    def service(self) -> Service:
        return Service(
            "chiasm.v1.EncoderService",
            {
                "EncodeImage": UnaryMethod(pb.EncodeImageRequest, self._encode_image),
                "EncodeImageStream": StreamMethod(
                    pb.EncodeImageStreamRequest, self._encode_image_stream
                ),
                "GetModel": UnaryMethod(pb.EncoderServiceGetModelRequest, self._get_model),
                "GetLoad": UnaryMethod(pb.EncoderServiceGetLoadRequest, self._get_load),
            },
        )

    def open(self, loaded: Loaded) -> None:
        """Serves `loaded` from now on."""
        self._loaded = loaded

    async def _encode_image(
        self, request: Wired[pb.EncodeImageRequest], call: Call
    ) -> Wired[pb.EncodeImageResponse]:
        with self._counted():
            response = self._reply(await self._answer(request, call))
            messages.check_unary(response)
            self._metrics.sent_bytes.inc(response.buffers.byte_count)
            return response

    async def _encode_image_stream(
        self, request: Wired[pb.EncodeImageStreamRequest], call: Call
    ) -> AsyncIterator[Wired[pb.EncodeImageStreamResponse]]:
        with self._counted():
            reply = self._reply(await self._answer(request, call))
            for event in send_embedding(reply):
                yield event
            self._metrics.sent_bytes.inc(reply.buffers.byte_count)

    async def _get_model(
        self, request: Wired[pb.EncoderServiceGetModelRequest], call: Call
    ) -> Wired[pb.EncoderServiceGetModelResponse]:
        ready = self._ready()
        return messages.to_model(
            ready.contract, ready.family, self._limits, ready.encoder_name, chiasm.__version__
        )

    async def _get_load(
        self, request: Wired[pb.EncoderServiceGetLoadRequest], call: Call
    ) -> Wired[pb.EncoderServiceGetLoadResponse]:
        load = self._loaded.load if self._loaded else Load()
        return plain(
            pb.EncoderServiceGetLoadResponse(
                queued_image_count=load.images,
                queued_patch_count=load.patches,
                in_flight_patch_count=load.in_flight_patches,
                active_call_count=self._active,
                draining=self._is_draining(),
            )
        )

    async def _answer(self, request: Wired[Any], call: Call) -> Answer:
        began = time.monotonic()
        ready = self._ready()
        identity = ready.contract.expected_identity
        messages.check_expected(request.message, identity)
        picture = messages.read_picture(request, self._limits.max_bytes)
        digest = hashlib.sha256()
        await _add(digest, picture.data)
        obtained = await self._obtain(ready, picture, digest.digest(), call)
        answer = Answer(
            features=obtained.features,
            identity=identity,
            content_digest=digest.digest(),
            source=obtained.source,
            times=obtained.times,
            total_seconds=time.monotonic() - began,
            encoder_name=ready.encoder_name,
        )
        _note(call, answer)
        _trace(spans.current(), answer, began)
        return answer

    def _reply(self, answer: Answer) -> Wired[pb.EncodeImageResponse]:
        with self._metrics.stage_seconds.labels("reply").time():
            return messages.to_reply(answer)

    async def _obtain(self, ready: Loaded, picture: Picture, digest: bytes, call: Call) -> Obtained:
        key = embedding_key(
            picture.tenant,
            ready.contract.expected_identity,
            digest,
            picture.data.nbytes,
            picture.options,
        )
        return await ready.flights.obtain(
            key, picture.data, picture.options, call.request_id, call.deadline
        )

    def _ready(self) -> Loaded:
        if self._loaded is None:
            text = "The encoder is loading its checkpoint; try again later."
            raise ChiasmError(Reason.NOT_READY, text, retry_after=1.0)
        return self._loaded

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1


async def _add(digest: "hashlib._Hash", data: memoryview) -> None:
    if data.nbytes <= _SMALL:
        digest.update(data)
    else:
        await asyncio.to_thread(digest.update, data)


def _note(call: Call, answer: Answer) -> None:
    times = answer.times
    call.notes.update(
        source=answer.source.name.lower(),
        rows=answer.features.rows.shape[0],
        bytes=answer.features.byte_count,
        preprocess_ms=round(times.preprocess * 1000, 1),
        queue_ms=round(times.queue * 1000, 1),
        forward_ms=round(times.forward * 1000, 1),
    )


def _trace(span: spans.Span, answer: Answer, came: float) -> None:
    """Says of a call's span how its picture was had, and adds the stages since it `came`.

    Those of a picture that another call had asked for before began before this one.
    """
    if not span.recording:
        return
    span.put(
        {
            names.ENCODE_SOURCE: answer.source.name.lower(),
            names.ENCODER_NAME: answer.encoder_name,
            names.IMAGE_ROWS: answer.features.rows.shape[0],
            names.TENSOR_BYTES: answer.features.byte_count,
        }
    )
    times = answer.times
    prepared_at = times.decoding_at + times.preprocess
    for stage, began, ended in (
        (names.QUEUE, times.arrived_at, times.decoding_at),
        (names.DECODE_IMAGE, times.decoding_at, prepared_at),
        (names.QUEUE, prepared_at, times.forward_at),
        (names.TOWER, times.forward_at, times.forward_at + times.forward),
    ):
        if ended > came:
            span.past(stage, max(began, came), ended)
