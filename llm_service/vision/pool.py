"""The remote vision source: encoder services, tried in order of their load.

A picture goes to the encoder with the fewest outstanding pictures. If that one cannot be reached,
is full, or answers against the contract, the next is tried, each at most once and within the
deadline. An error in the picture itself is final.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from chiasm import telemetry, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import ImageContract
from chiasm.models.wire import identity_to_wire, options_to_wire
from chiasm.rpc import limits
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.rpc.context import seconds_left
from chiasm.rpc.embedding_stream import receive_embedding
from chiasm.v1 import encoder_service_pb2, image_pb2
from llm_service.embeddings import Rows, check_embedding
from llm_service.request import CallerEmbedding, RawImage
from llm_service.vision.source import Asked, Fetched

# What another encoder may answer better. QUEUE_FULL last: it is what the caller is told if all are.
_TRY_ANOTHER = frozenset({Reason.NOT_READY, Reason.NO_ENCODER, Reason.QUEUE_FULL, Reason.INTERNAL})
_FAULTS_OF_THE_PICTURE = frozenset(
    {Reason.IMAGE_INVALID, Reason.IMAGE_TOO_LARGE, Reason.REQUEST_INVALID, Reason.UNSUPPORTED}
)
_RETRY_SECONDS = 1.0


class Encoder:
    """One encoder service: its channel and the pictures it has not answered yet."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.channel = open_channel(target)
        self.outstanding = 0


class EncoderPool:
    """Encoder services behind one LLM service."""

    def __init__(self, targets: Sequence[str], contract: ImageContract) -> None:
        self._encoders = [Encoder(target) for target in targets]
        self._contract = contract
        self._identity = identity_to_wire(contract.expected_identity)
        self._turn = itertools.count()

    async def encode(self, image: RawImage, asked: Asked) -> Fetched:
        failures: list[ChiasmError] = []
        for encoder in by_load(self._encoders, next(self._turn)):
            try:
                return await self._ask(encoder, image, asked)
            except ChiasmError as error:
                if error.reason in _FAULTS_OF_THE_PICTURE:
                    raise _fault_of_the_picture(error) from error
                failures.append(error)
                telemetry.logger().warning(
                    "encoder failed", encoder=encoder.target, detail=str(error)
                )
                if error.reason not in _TRY_ANOTHER or seconds_left(asked.deadline) <= 0:
                    break
        raise told_failure(failures)

    async def close(self) -> None:
        for encoder in self._encoders:
            await encoder.channel.close()

    async def _ask(self, encoder: Encoder, image: RawImage, asked: Asked) -> Fetched:
        began = time.monotonic()
        encoder.outstanding += 1
        try:
            reply = await self._call(encoder, image, asked)
        finally:
            encoder.outstanding -= 1
        rows = self._checked(reply.message.embedding, reply.buffers)
        return Fetched(
            rows=rows,
            origin="remote",
            encoder_name=reply.message.encoder_name or encoder.target,
            encoder_cache_hit=reply.message.source == encoder_service_pb2.ENCODE_SOURCE_CACHE,
            encode_seconds=reply.message.timings.total_seconds,
            fetch_seconds=time.monotonic() - began,
        )

    async def _call(self, encoder: Encoder, image: RawImage, asked: Asked) -> wire.Wired[Any]:
        how: dict[str, Any] = {
            "timeout": max(0.001, seconds_left(asked.deadline)),
            "metadata": ((limits.REQUEST_ID, asked.request_id),),
        }
        try:
            request = self._request(encoder_service_pb2.EncodeImageRequest, image, asked)
            return await EncoderMethods.ENCODE_IMAGE.call(encoder.channel, request, **how)
        except ChiasmError as error:
            if error.reason is not Reason.TENSOR_TOO_LARGE:
                raise
        streamed = self._request(encoder_service_pb2.EncodeImageStreamRequest, image, asked)
        method = EncoderMethods.ENCODE_IMAGE_STREAM
        return await receive_embedding(method.stream(encoder.channel, streamed, **how))

    def _request(self, kind: Any, image: RawImage, asked: Asked) -> wire.Wired[Any]:
        buffers = wire.Buffers()
        message = kind(
            image=image_pb2.Image(
                data=buffers.put(image.data), options=options_to_wire(image.options)
            ),
            tenant=asked.tenant,
            expected_identity=self._identity,
        )
        return wire.Wired(message, buffers)

    def _checked(self, embedding: image_pb2.ImageEmbedding, buffers: wire.Buffers) -> Rows:
        levels = tuple(buffers.get(level.data) for level in embedding.levels)
        features = buffers.get(embedding.features.data)
        try:
            rows = check_embedding(CallerEmbedding(embedding, features, levels), self._contract)
        except ChiasmError as error:
            raise _broken_contract(error) from error
        if not rows.identity_checked:
            raise _broken_contract(None)
        return rows


def by_load(encoders: Sequence[Encoder], turn: int) -> list[Encoder]:
    """The order in which to try: fewest outstanding first; equals take turns."""
    start = turn % len(encoders)
    rotated = [*encoders[start:], *encoders[:start]]
    return sorted(rotated, key=lambda encoder: encoder.outstanding)


def told_failure(failures: Sequence[ChiasmError]) -> ChiasmError:
    """What the caller is told when every encoder that was tried has failed."""
    last = failures[-1]
    if last.reason not in _TRY_ANOTHER:
        return last
    full = next((error for error in failures if error.reason is Reason.QUEUE_FULL), None)
    if full is not None:
        return ChiasmError(
            Reason.QUEUE_FULL, "The encoders are busy; try again.", None, full.retry_after
        )
    return ChiasmError(
        Reason.NO_ENCODER,
        "No encoder answered. The picture was not encoded; try again.",
        retry_after=_RETRY_SECONDS,
    )


def _fault_of_the_picture(error: ChiasmError) -> ChiasmError:
    # The encoder's field is relative to its own request: `image.data`.
    place = (error.field or "image").removeprefix("image").removeprefix(".") or None
    return ChiasmError(error.reason, error.message, place, error.retry_after, error.metadata)


def _broken_contract(error: ChiasmError | None) -> ChiasmError:
    if error is not None and error.reason is Reason.ENCODER_MISMATCH:
        return ChiasmError(error.reason, error.message, metadata={"origin": "encoder"})
    detail = "it sent no identity" if error is None else str(error)
    return ChiasmError(Reason.INTERNAL, f"The encoder's answer breaks the contract: {detail}")
