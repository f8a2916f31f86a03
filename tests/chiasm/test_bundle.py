"""Several connections to one peer, against a real server behind a link of limited speed."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from chiasm import tensors, wire
from chiasm.errors import ChiasmError
from chiasm.rpc.bundle import Bundle
from chiasm.rpc.channel import EncoderMethods
from chiasm.rpc.server import Call, Server, ServerSettings, Service, UnaryMethod
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import image_pb2

SETTINGS = ServerSettings("127.0.0.1", 0, 0, 0, 60)
LARGE_BYTES = 120_000_000
# Of the link, bytes a second on each connection: the large reply takes two seconds.
RATE = 60_000_000
STEP_SECONDS = 0.01
LARGE = wire.plain(pb.EncodeImageRequest())
SMALL = wire.plain(pb.EncoderServiceGetLoadRequest())


async def large(request: wire.Wired[Any], call: Call) -> wire.Wired[Any]:
    buffers = wire.Buffers()
    array = tensors.from_numpy(np.zeros((LARGE_BYTES // 4, 1), np.float32))
    embedding = image_pb2.ImageEmbedding(features=tensors.to_wire(array, buffers))
    return wire.Wired(pb.EncodeImageResponse(embedding=embedding), buffers)


async def small(request: wire.Wired[Any], call: Call) -> wire.Wired[Any]:
    return wire.plain(pb.EncoderServiceGetLoadResponse(active_call_count=1))


class Link:
    """Passes connections on to a port; what comes back is slow."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.count += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_carry(reader, far_writer, 0), _carry(far_reader, writer, RATE))
        far_writer.close()
        writer.close()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: int) -> None:
    size = int(rate * STEP_SECONDS) or 1 << 16
    while data := await reader.read(size):
        writer.write(data)
        await writer.drain()
        if rate:
            await asyncio.sleep(len(data) / rate)
    writer.close()


@asynccontextmanager
async def link_to_server() -> AsyncIterator[tuple[Link, str]]:
    methods: dict[str, UnaryMethod[Any]] = {
        "EncodeImage": UnaryMethod(pb.EncodeImageRequest, large),
        "GetLoad": UnaryMethod(pb.EncoderServiceGetLoadRequest, small),
    }
    service = Service("chiasm.v1.EncoderService", {**methods})
    server = Server(SETTINGS, service, CollectorRegistry())
    await server.start()
    await server.ready()
    link = Link(server.port)
    listening = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    try:
        yield link, f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await server.abort()
        await link.end()


async def ask_small(bundle: Bundle) -> float:
    """Seconds of a small call."""
    began = time.perf_counter()
    with bundle.lent(100) as channel:
        reply = await EncoderMethods.GET_LOAD.call(channel, SMALL, timeout=30)
    assert reply.message.active_call_count == 1
    return time.perf_counter() - began


async def ask_large(bundle: Bundle) -> None:
    with bundle.lent(LARGE_BYTES) as channel:
        reply = await EncoderMethods.ENCODE_IMAGE.call(channel, LARGE, timeout=30)
    assert len(reply.data(reply.message.embedding.features.data)) == LARGE_BYTES


async def small_beside_large(target: str, connections: int) -> float:
    """Median seconds of small calls, one after the other, while a large reply comes."""
    bundle = Bundle(target, connections)
    try:
        for _ in range(connections):
            await ask_small(bundle)
        coming = asyncio.ensure_future(ask_large(bundle))
        await asyncio.sleep(0.5)
        times = []
        while not coming.done():
            times.append(await ask_small(bundle))
        await coming
        return statistics.median(times)
    finally:
        await bundle.close()


async def test_a_small_reply_does_not_wait_behind_a_large_one_on_another_connection() -> None:
    async with link_to_server() as (_, target):
        alone = await small_beside_large(target, 1)
        beside = await small_beside_large(target, 2)
    assert beside < alone / 3


async def test_all_connections_can_be_made_before_they_are_used() -> None:
    async with link_to_server() as (link, target):
        bundle = Bundle(target, 3)
        try:
            bundle.connect()
            async with asyncio.timeout(5):
                while link.count < 3:
                    await asyncio.sleep(0.01)
        finally:
            await bundle.close()


async def test_each_connection_of_a_bundle_is_one_of_its_own_and_made_when_used() -> None:
    async with link_to_server() as (link, target):
        bundle = Bundle(target, 3)
        assert link.count == 0
        with bundle.lent(5), bundle.lent(5):
            await ask_small(bundle)
            assert link.count == 1
        with bundle.lent(5):
            await ask_small(bundle)
            assert link.count == 2
        await bundle.close()


async def test_the_connection_with_the_fewest_expected_bytes_is_lent() -> None:
    bundle = Bundle("127.0.0.1:1", 3)
    with bundle.lent(300) as first, bundle.lent(100) as second, bundle.lent(200) as third:
        assert len({id(first), id(second), id(third)}) == 3
        with bundle.lent(150) as fourth, bundle.lent(1) as fifth:
            assert fourth is second
            assert fifth is third
        with bundle.lent(1) as sixth:
            assert sixth is second
    with bundle.lent(0) as seventh:
        assert seventh is first
    await bundle.close()


async def test_a_call_that_failed_no_longer_counts() -> None:
    bundle = Bundle("127.0.0.1:1", 2)
    with pytest.raises(ChiasmError), bundle.lent(1000) as first:
        await EncoderMethods.GET_LOAD.call(first, SMALL, timeout=5)
    with bundle.lent(1) as again:
        assert again is first
    await bundle.close()
