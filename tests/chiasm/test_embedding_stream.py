"""The chunked form of an embedding: what is sent arrives, and whatever breaks the form is refused.

The first half hands events from one end to the other, the second half uses real servers.
"""

import asyncio
import time
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc import limits
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.rpc.embedding_stream import (
    MAX_STREAMED_BYTES,
    Event,
    Reply,
    receive_embedding,
    send_embedding,
)
from chiasm.rpc.server import Call, Server, ServerSettings, Service, StreamMethod
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import image_pb2, tensor_pb2

SETTINGS = ServerSettings("127.0.0.1", 0, 0, 0, 60)
REQUEST = wire.plain(pb.EncodeImageStreamRequest())
CHUNK = limits.LEAST_CHUNK_BYTES
Serve = Callable[[], AsyncIterator[Event]]


def reply_of(features: npt.NDArray[Any], *levels: npt.NDArray[Any]) -> Reply:
    buffers = wire.Buffers()
    arrays = [tensors.from_numpy(one) for one in (features, *levels)]
    first, *others = (tensors.to_wire(array, buffers) for array in arrays)
    embedding = image_pb2.ImageEmbedding(features=first, levels=others, row_count=len(features))
    source = pb.ENCODE_SOURCE_CACHE
    return wire.Wired(
        pb.EncodeImageResponse(embedding=embedding, source=source, encoder_name="eye"), buffers
    )


def noise(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(7).random(shape, np.float32)


def held(reply: Reply) -> list[npt.NDArray[Any]]:
    embedding = reply.message.embedding
    return [
        tensors.from_wire(one, reply.data(one.data)).storage
        for one in (embedding.features, *embedding.levels)
    ]


def events_of(reply: Reply) -> list[Event]:
    """The events as they arrive: serialised, and read again."""
    return [
        wire.parse(pb.EncodeImageStreamResponse, wire.serialize(event))
        for event in send_embedding(reply)
    ]


def chunk(offset: int, data: bytes) -> Event:
    buffers = wire.Buffers()
    part = pb.StreamChunk(byte_offset=offset, data=buffers.put(data))
    return wire.Wired(pb.EncodeImageStreamResponse(chunk=part), buffers)


def header(total: int, *shape: int) -> Event:
    features = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_UINT8, shape=shape)
    embedding = image_pb2.ImageEmbedding(features=features)
    stated = pb.StreamHeader(embedding=embedding, total_byte_count=total)
    return wire.plain(pb.EncodeImageStreamResponse(header=stated))


async def received(events: Sequence[Event]) -> Reply:
    async def coming() -> AsyncGenerator[Event, None]:
        for event in events:
            yield event

    return await receive_embedding(coming())


@pytest.mark.parametrize("size", [4, CHUNK - 4, CHUNK, CHUNK + 4, 3 * CHUNK, 9 * CHUNK + 4])
async def test_any_number_of_bytes_arrives_with_everything_beside_them(size: int) -> None:
    features = noise(size // 4, 1)
    arrived = await received(events_of(reply_of(features)))
    assert np.array_equal(held(arrived)[0], features)
    message = arrived.message
    assert (message.encoder_name, message.source) == ("eye", pb.ENCODE_SOURCE_CACHE)
    assert message.embedding.row_count == len(features)


async def test_levels_follow_the_features_each_in_its_own_shape() -> None:
    parts: list[npt.NDArray[Any]] = [noise(300, 1000), noise(300, 700)]
    parts.append(noise(300, 1000).astype(np.float16))
    arrived = await received(events_of(reply_of(*parts)))
    for part, found in zip(parts, held(arrived), strict=True):
        assert np.array_equal(part, found)


def cut(event: Event) -> Event:
    """A chunk without its last byte."""
    part = event.message.chunk
    return chunk(part.byte_offset, bytes(event.data(part.data))[:-1])


def flipped(event: Event) -> Event:
    """A chunk with one bit changed."""
    data = bytearray(event.data(event.message.chunk.data))
    data[len(data) // 2] ^= 1
    return chunk(event.message.chunk.byte_offset, bytes(data))


Breach = tuple[str, str, Callable[[list[Event]], list[Event]]]
# Of header, three chunks and trailer: what is wrong, what is told, what comes.
BREACHES: list[Breach] = [
    ("nothing", "begin with a header", lambda good: []),
    ("no header", "begin with a header", lambda good: good[1:]),
    ("two headers", "second header", lambda good: [good[0], *good]),
    ("a chunk too early", "out of place", lambda good: [good[0], good[2], good[1], *good[3:]]),
    ("a chunk twice", "out of place", lambda good: [*good[:2], *good[1:]]),
    ("a chunk left out", "out of place", lambda good: [*good[:2], *good[3:]]),
    ("a chunk cut short", "out of place", lambda good: [good[0], cut(good[1]), *good[2:]]),
    ("the last cut short", "bytes are missing", lambda good: [*good[:3], cut(good[3]), good[4]]),
    ("an empty chunk", "out of place", lambda good: [good[0], chunk(0, b""), *good[1:]]),
    ("more than stated", "out of place", lambda good: [*good[:4], chunk(3 * CHUNK, b"x"), good[4]]),
    ("a chunk after the end", "out of place", lambda good: [*good, good[1]]),
    ("no trailer", "without a trailer", lambda good: good[:-1]),
    ("two trailers", "second trailer", lambda good: [*good, good[-1]]),
    ("one bit changed", "checksum is wrong", lambda good: [good[0], flipped(good[1]), *good[2:]]),
    ("a huge chunk", "more than", lambda good: [
        header(limits.MAX_CHUNK_BYTES + 1, limits.MAX_CHUNK_BYTES + 1),
        chunk(0, bytes(limits.MAX_CHUNK_BYTES + 1)),
    ]),
    ("shape and size at odds", "disagree", lambda good: [header(11, 2, 5), *good[1:]]),
]  # fmt: skip


@pytest.mark.parametrize(("told", "breach"), [one[1:] for one in BREACHES], ids=[
    one[0] for one in BREACHES
])  # fmt: skip
async def test_whatever_breaks_the_form_is_refused_by_name(
    told: str, breach: Callable[[list[Event]], list[Event]]
) -> None:
    good = events_of(reply_of(noise(3 * CHUNK // 4, 1)))
    assert len(good) == 5
    with pytest.raises(ChiasmError, match=told) as refused:
        await received(breach(good))
    assert refused.value.reason is Reason.TENSOR_INVALID


async def test_one_row_above_512_mib_is_refused_before_any_of_it_is_allocated() -> None:
    rows = MAX_STREAMED_BYTES // 1024
    tracemalloc.start()
    with pytest.raises(ChiasmError, match="exceed the limit"):
        await received([header(MAX_STREAMED_BYTES + 1024, rows + 1, 1024)])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    with pytest.raises(ChiasmError, match="without a trailer"):
        await received([header(MAX_STREAMED_BYTES, rows, 1024)])
    assert tracemalloc.get_traced_memory()[1] > MAX_STREAMED_BYTES
    tracemalloc.stop()


class Sender:
    """A server whose chunked replies are what a test says, and whether they came to their end."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.ended = asyncio.Event()
        self.sent = 0

    async def answer(self, request: wire.Wired[Any], call: Call) -> AsyncIterator[Event]:
        try:
            async for event in self._serve():
                yield event
                self.sent += 1
        finally:
            self.ended.set()

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[Callable[[float], Any]]:
        """Asks for the reply, with a deadline in seconds."""
        methods = {"EncodeImageStream": StreamMethod(pb.EncodeImageStreamRequest, self.answer)}
        registry = CollectorRegistry()
        server = Server(SETTINGS, Service("chiasm.v1.EncoderService", methods), registry)
        await server.start()
        await server.ready()
        channel = open_channel(f"127.0.0.1:{server.port}")
        method = EncoderMethods.ENCODE_IMAGE_STREAM
        try:
            yield lambda seconds: receive_embedding(
                method.stream(channel, REQUEST, timeout=seconds)
            )
        finally:
            await channel.close()
            await server.abort()
        self.statuses = {
            sample.labels["status"]: sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name == "chiasm_rpc_calls_total"
        }


async def test_512_mib_arrive_unchanged_and_the_call_ends_well() -> None:
    # Zeros cost the sender no memory; the marks show that all is in its place.
    features = np.zeros((MAX_STREAMED_BYTES // 4096, 1024), np.float32)
    marks = np.arange(0, len(features), 997)
    features[marks, marks % 1024] = marks + 1

    async def whole() -> AsyncIterator[Event]:
        for event in send_embedding(reply_of(features)):
            yield event

    sender = Sender(whole)
    async with sender.asked() as ask:
        (arrived,) = held(await ask(60))
        assert arrived.shape == features.shape
        assert np.array_equal(arrived[marks, marks % 1024], marks + 1)
        assert np.count_nonzero(arrived) == len(marks)
    assert sender.statuses == {"OK": 1}


@pytest.mark.parametrize("surplus", [b"", bytes(CHUNK)], ids=["empty", "full"])
async def test_a_stream_without_end_is_left_at_once_and_the_sender_stops(surplus: bytes) -> None:
    async def endless() -> AsyncIterator[Event]:
        for event in events_of(reply_of(noise(CHUNK // 4, 1)))[:2]:
            yield event
        while True:
            yield chunk(CHUNK, surplus)

    sender = Sender(endless)
    async with sender.asked() as ask:
        with pytest.raises(ChiasmError, match="out of place") as refused:
            await ask(60)
        # Already now, though the error is still held.
        await asyncio.wait_for(sender.ended.wait(), 5)
    assert refused.value.reason is Reason.TENSOR_INVALID
    assert sender.sent < 1000
    assert sender.statuses == {"CANCELLED": 1}


async def test_silence_in_the_middle_lasts_as_long_as_the_deadline() -> None:
    async def stalled() -> AsyncIterator[Event]:
        for event in events_of(reply_of(noise(CHUNK, 1)))[:2]:
            yield event
        await asyncio.Event().wait()

    sender = Sender(stalled)
    async with sender.asked() as ask:
        began = time.monotonic()
        with pytest.raises(ChiasmError) as late:
            await ask(0.5)
        assert 0.4 < time.monotonic() - began < 3
        await asyncio.wait_for(sender.ended.wait(), 5)
    assert late.value.reason is Reason.DEADLINE


async def test_who_leaves_ends_the_stream_at_the_sender() -> None:
    async def stalled() -> AsyncIterator[Event]:
        yield header(10, 2, 5)
        await asyncio.Event().wait()

    sender = Sender(stalled)
    async with sender.asked() as ask:
        asking = asyncio.ensure_future(ask(60))
        async with asyncio.timeout(5):
            while not sender.sent:
                await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(sender.ended.wait(), 5)
