"""A real `chiasm.v1.EncoderService` on a real socket that is honest, or lies as its script says.

For tests of whatever asks encoders: the features are a real tower's, and what is wrong with the
answer is put into it afterwards.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from prometheus_client import CollectorRegistry

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.images import decode_image
from chiasm.models.vision import ImageFeatures, VisionHalf
from chiasm.models.wire import identity_to_wire
from chiasm.rpc.callers import ServerTls
from chiasm.rpc.embedding_stream import send_embedding
from chiasm.rpc.server import Call, Server, ServerSettings, Service, StreamMethod, UnaryMethod
from chiasm.v1 import encoder_service_pb2 as pb
from encoder_service.batcher import StageTimes
from encoder_service.messages import Answer, to_reply
from encoder_service.single_flight import Source

Behaviour = Literal[
    "honest",
    "too few rows",
    "rows of another size",
    "not finite",
    "another picture",
    "no identity",
    "another identity",
    "garbage",
    "silent",
    "refuses",
    "busy",
    "fails",
    "truncated chunk",
    "wrong checksum",
    "no trailer",
    "endless chunks",
    "more than stated",
    "chunks out of order",
    "huge header",
    "dripping chunks",
]


class ScriptedEncoder:
    """The service. Change `behaviour`, `seconds` (before each answer) or `identity` at any time."""

    def __init__(self, half: VisionHalf, behaviour: Behaviour = "honest") -> None:
        self._half = half
        self.behaviour: Behaviour = behaviour
        self.seconds = 0.0
        # What it says that its answers took.
        self.claimed_seconds = 0.01
        self.model_id = half.identity.model_id
        self.probes_answered = True
        self.probes_refused = False
        # Pictures asked for, and those whose caller left before the answer.
        self.asked: list[bytes] = []
        self.left = 0
        self.running = 0
        self.most_running = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(
        self, port: int = 0, *, tls: ServerTls | None = None
    ) -> AsyncIterator["ScriptedEncoder"]:
        """The server, ready, on a free port unless one is named."""
        settings = ServerSettings("127.0.0.1", port or self.port, 0, 0, 60)
        server = Server(settings, self._service(), CollectorRegistry(), tls=tls)
        await server.start()
        await server.ready()
        self.port = server.port
        try:
            yield self
        finally:
            await server.abort()

    def _service(self) -> Service:
        return Service(
            "chiasm.v1.EncoderService",
            {
                "EncodeImage": UnaryMethod(pb.EncodeImageRequest, self._encode),
                "EncodeImageStream": StreamMethod(pb.EncodeImageStreamRequest, self._stream),
                "GetModel": UnaryMethod(pb.EncoderServiceGetModelRequest, self._model),
                "GetLoad": UnaryMethod(pb.EncoderServiceGetLoadRequest, self._load),
            },
        )

    async def _model(self, request: wire.Wired[Any], call: Call) -> wire.Wired[Any]:
        await self._probed()
        identity = identity_to_wire(replace(self._half.identity, model_id=self.model_id))
        name = f"scripted-{self.port}"
        return wire.plain(pb.EncoderServiceGetModelResponse(identity=identity, encoder_name=name))

    async def _load(self, request: wire.Wired[Any], call: Call) -> wire.Wired[Any]:
        await self._probed()
        return wire.plain(pb.EncoderServiceGetLoadResponse())

    async def _probed(self) -> None:
        if self.probes_refused:
            raise ChiasmError(Reason.NOT_READY, "It is scripted to refuse probes.")
        if not self.probes_answered:
            await asyncio.Event().wait()

    async def _encode(self, request: wire.Wired[Any], call: Call) -> wire.Wired[Any]:
        return await self._answer(request)

    async def _stream(self, request: wire.Wired[Any], call: Call) -> AsyncIterator[wire.Wired[Any]]:
        reply = await self._answer(request)
        events = list(send_embedding(reply))
        async for event in _broken_stream(self.behaviour, events):
            yield event

    async def _answer(self, request: wire.Wired[Any]) -> wire.Wired[Any]:
        data = bytes(request.data(request.message.image.data))
        self.asked.append(data)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._wait_or_fail()
            return await asyncio.to_thread(self._reply, data)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.running -= 1

    async def _wait_or_fail(self) -> None:
        await asyncio.sleep(self.seconds)
        match self.behaviour:
            case "silent":
                await asyncio.Event().wait()
            case "refuses":
                raise ChiasmError(Reason.NOT_READY, "It is scripted to refuse.")
            case "busy":
                raise ChiasmError(Reason.QUEUE_FULL, "It is scripted to be busy.", None, 3.0)
            case "fails":
                raise ChiasmError(Reason.INTERNAL, "It is scripted to fail.")

    def _reply(self, data: bytes) -> wire.Wired[Any]:
        half = self._half
        (features,) = half.encode([half.preprocess(decode_image(data))])
        digest = hashlib.sha256(data).digest()
        identity = half.identity
        match self.behaviour:
            case "too few rows":
                features = _with_rows(features, features.rows[:-1])
            case "rows of another size":
                features = _with_rows(features, features.rows[:, :-1].contiguous())
            case "not finite":
                rows = features.rows.clone()
                rows[-1, -1] = float("nan")
                features = _with_rows(features, rows)
            case "another picture":
                digest = hashlib.sha256(b"another").digest()
            case "another identity":
                identity = replace(identity, weights_digest="0" * 64)
        reply = to_reply(
            Answer(features, identity, digest, Source.COMPUTED, StageTimes(),
                   self.claimed_seconds, f"scripted-{self.port}")
        )  # fmt: skip
        if self.behaviour == "no identity":
            reply.message.embedding.ClearField("identity")
        if self.behaviour == "garbage":
            reply.message.embedding.features.shape[:] = [2**62, 2**62]
        return reply


async def _broken_stream(
    behaviour: Behaviour, events: list[wire.Wired[Any]]
) -> AsyncIterator[wire.Wired[Any]]:
    header, *chunks, trailer = events
    match behaviour:
        case "truncated chunk":
            events = [header, *chunks[:-1], _chunk(chunks[-1], cut=1), trailer]
        case "wrong checksum":
            trailer.message.trailer.checksum ^= 1
        case "no trailer":
            events = events[:-1]
        case "chunks out of order":
            chunks[0].message.chunk.byte_offset += 1
        case "more than stated":
            events = [header, *chunks, *chunks, trailer]
        case "huge header":
            header.message.header.total_byte_count = 1 << 40
            header.message.header.embedding.features.shape[:] = [1 << 28, 1 << 10]
        case "endless chunks":
            yield header
            while True:
                yield chunks[0]
                await asyncio.sleep(0)
        case "dripping chunks":
            yield header
            await asyncio.Event().wait()
    for event in events:
        yield event


def _chunk(event: wire.Wired[Any], cut: int) -> wire.Wired[Any]:
    buffers = wire.Buffers()
    chunk = event.message.chunk
    data = buffers.put(event.data(chunk.data)[:-cut])
    shorter = pb.StreamChunk(byte_offset=chunk.byte_offset, data=data)
    return wire.Wired(pb.EncodeImageStreamResponse(chunk=shorter), buffers)


def _with_rows(features: ImageFeatures, rows: torch.Tensor) -> ImageFeatures:
    return replace(features, rows=rows, placeholder_count=len(rows))
