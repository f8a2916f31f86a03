"""A network that takes its time is slow, and not down."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from chiasm.client import AsyncClient
from chiasm.conversation import Sampling, user
from tests.system.three import Three

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

DELAY_SECONDS = 0.4


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes bytes on, each `DELAY_SECONDS` late."""
    loop = asyncio.get_running_loop()
    while data := await reader.read(1 << 16):
        loop.call_later(DELAY_SECONDS, writer.write, data)
    await asyncio.sleep(DELAY_SECONDS)
    writer.close()
    await writer.wait_closed()


async def connect(
    port: int,
    connections: set["asyncio.Task[None]"],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    task = asyncio.current_task()
    assert task is not None
    connections.add(task)
    inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(
        carry(reader, inner_writer), carry(inner_reader, writer), return_exceptions=True
    )


@asynccontextmanager
async def slow_way_to(port: int) -> AsyncIterator[str]:
    """An address whose bytes reach `port` late, and so do those that come back."""
    connections: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(partial(connect, port, connections), "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        # The loop must not end before the sockets of both sides are closed.
        await asyncio.wait_for(asyncio.gather(*connections, return_exceptions=True), 30)


async def test_the_first_call_over_a_slow_network_is_answered(tiny: Three) -> None:
    async with slow_way_to(tiny.llm.port) as target, AsyncClient(target, timeout=30) as client:
        answer = await client.generate([user("Hi")], Sampling(max_tokens=2, ignore_eos=True))
        assert answer.usage.completion_token_count == 2
