"""Channels to services whose names come late, against a name server and a service on real ports."""

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import pytest

from chiasm.rpc import lined_channel
from chiasm.rpc.channel import open_channel
from chiasm.rpc.lined_channel import PlainChannel

_NAME = "late.chiasm.test"
_A, _ANSWER, _NO_SUCH_NAME = 1, 0x8580, 0x8583


class Names(asyncio.DatagramProtocol):
    """A name server (RFC 1035) that knows one name, once `address` is set."""

    def __init__(self) -> None:
        self.address: bytes | None = None
        self.asked: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: object) -> None:
        end = data.index(b"\0", 12) + 5
        question, (kind,) = data[12:end], struct.unpack(">H", data[end - 4 : end - 2])
        if kind == _A:
            self.asked.append(time.monotonic())
        found = kind == _A and self.address is not None
        code = _NO_SUCH_NAME if self.address is None else _ANSWER
        header = data[:2] + struct.pack(">HHHHH", code, 1, int(found), 0, 0)
        record = b""
        if found:
            assert self.address is not None
            record = b"\xc0\x0c" + struct.pack(">HHIH", _A, 1, 1, 4) + self.address
        self._transport.sendto(header + question + record, peer)  # type: ignore[attr-defined]


@asynccontextmanager
async def names() -> AsyncIterator[tuple[Names, int]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
    try:
        yield server, transport.get_extra_info("sockname")[1]
    finally:
        transport.close()


class _Echo(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.release = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        handlers: dict[str, Any] = {
            "/echo/Stream": grpc.unary_stream_rpc_method_handler(self._stream),
            "/echo/Echo": grpc.unary_unary_rpc_method_handler(self._echo),
        }
        return handlers.get(details.method)  # a client of ours asks for health too

    async def _echo(self, request: bytes, _: object) -> bytes:
        return request

    async def _stream(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        yield request
        await self.release.wait()
        yield request


@asynccontextmanager
async def echoing(port: int = 0) -> AsyncIterator[tuple[_Echo, int]]:
    server, echo = grpc.aio.server(), _Echo()
    server.add_generic_rpc_handlers((echo,))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield echo, bound
    finally:
        await server.stop(0)


async def answers(channel: grpc.aio.Channel) -> bool:
    call: Any = channel.unary_unary("/echo/Echo", None, None)
    try:
        return bool(await call(b"hello", timeout=1) == b"hello")
    except grpc.RpcError:
        return False


async def until_it_answers(channel: grpc.aio.Channel, seconds: float) -> float:
    start = time.monotonic()
    async with asyncio.timeout(seconds):
        while not await answers(channel):
            await asyncio.sleep(0.05)
    return time.monotonic() - start


async def test_a_name_that_comes_late_is_found_without_the_librarys_long_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lined_channel, "FAILING_SECONDS", 0.3)
    async with (
        echoing() as (_, port),
        names() as (server, names_port),
        open_channel(f"dns://127.0.0.1:{names_port}/{_NAME}:{port}") as channel,
    ):
        with pytest.raises(TimeoutError):
            await until_it_answers(channel, 3.0)
        # gRPC alone would have asked after 0, 1 and 2.6 seconds.
        assert len(server.asked) >= 5
        pauses = [b - a for a, b in pairwise(server.asked)]
        assert max(pauses) < 1.0
        server.address = bytes((127, 0, 0, 1))
        await until_it_answers(channel, 5.0)
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_the_library_alone_pauses_longer() -> None:
    """What the module's reason says; when it no longer holds the module may go."""
    async with names() as (server, names_port):
        target = f"dns://127.0.0.1:{names_port}/{_NAME}:1"
        async with grpc.aio.insecure_channel(target) as channel:
            with pytest.raises(TimeoutError):
                await until_it_answers(channel, 3.0)
        assert len(server.asked) <= 4


async def test_a_running_stream_outlives_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lined_channel, "FAILING_SECONDS", 0.0)
    async with echoing() as (echo, port), open_channel(f"127.0.0.1:{port}") as channel:
        assert isinstance(channel, PlainChannel)
        stream = channel.unary_stream("/echo/Stream", None, None)(b"hello", timeout=20)
        assert await stream.read() == b"hello"
        first = channel.line()
        channel.replace(channel.anew())
        assert channel.line() is not first
        assert await answers(channel)
        echo.release.set()
        assert await stream.read() == b"hello"
        assert await stream.read() is grpc.aio.EOF
        async with asyncio.timeout(5):
            while first.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                await asyncio.sleep(0.01)


async def test_a_service_that_is_away_is_failed_at_once_and_found_again() -> None:
    async with echoing() as (_, port):
        pass
    async with open_channel(f"127.0.0.1:{port}") as channel:
        assert isinstance(channel, PlainChannel)
        first = channel.line()
        assert not await answers(channel)
        start = time.monotonic()
        assert not await answers(channel)
        assert time.monotonic() - start < 0.9  # seconds; the call's deadline is one
        assert channel.line() is first  # a moment's failure is left to gRPC
        async with echoing(port):
            await until_it_answers(channel, 10.0)


async def test_closing_ends_the_calls_of_replaced_channels_too() -> None:
    async with echoing() as (_, port):
        channel = open_channel(f"127.0.0.1:{port}")
        assert isinstance(channel, PlainChannel)
        stream = channel.unary_stream("/echo/Stream", None, None)(b"hello", timeout=20)
        assert await stream.read() == b"hello"
        channel.replace(channel.anew())
        assert await answers(channel)
        await channel.close()
        with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
            assert await stream.read() is grpc.aio.EOF
        assert stream.done()
