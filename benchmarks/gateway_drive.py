"""What the gateway's benchmark drives with: processes, and one connection at a time of each kind.

`python -m benchmarks.gateway_drive PORT`: keeps 32 paced streams going until it is killed.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

import httptools
import psutil
import uvloop

from benchmarks.engine_client import AnswerFailed, EventReader
from benchmarks.gateway_llm import TOKEN, Plan
from chiasm import wire
from chiasm.rpc.channel import LlmMethods, open_channel

ROOT: Final = Path(__file__).parents[1]
BACKGROUND: Final = Plan(tokens=200, per_message=4, pause_seconds=0.02)
BACKGROUND_STREAMS: Final = 32
_MARK: Final = TOKEN.encode()


@dataclass(frozen=True)
class Running:
    """A child process and the port that it serves."""

    process: psutil.Process
    port: int
    output: IO[str]

    def line(self) -> str:
        """The next line that it prints; waits for it."""
        return self.output.readline()

    @property
    def cpu_seconds(self) -> float:
        """Of all its threads since its start, in user and in system mode."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)


@contextmanager
def child(*command: str) -> Iterator[Running]:
    """`python -m` a service that prints a line of JSON with its port; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{command[0]} did not start; run python -m {' '.join(command)}")
        yield Running(psutil.Process(process.pid), json.loads(line)["port"], process.stdout)
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Pair:
    """The LLM service of no model, and a gateway before it."""

    llm: Running
    gateway: Running


@contextmanager
def pair(*gateway_flags: str) -> Iterator[Pair]:
    """Both processes, ready."""
    with (
        child("benchmarks.gateway_llm") as llm,
        child("gateway", "--port", "0", "--llm", f"127.0.0.1:{llm.port}", *gateway_flags) as http,
    ):
        yield Pair(llm, http)


class Direct:
    """Asks the LLM service by gRPC, as the gateway does, and reads each message."""

    def __init__(self, port: int) -> None:
        self._channel = open_channel(f"127.0.0.1:{port}")

    async def ask(self, plan: Plan) -> float:
        """Reads an answer to its end; returns the seconds to its first text."""
        began, first, pieces = time.perf_counter(), 0.0, []
        stream = LlmMethods.GENERATE.open_stream(self._channel, wire.plain(plan.request()))
        try:
            await stream.accepted()
            async for answer in stream:
                first = first or time.perf_counter() - began
                pieces += [delta.text for delta in answer.message.delta.deltas]
        finally:
            stream.cancel()
        assert "".join(pieces) == plan.text, "the direct answer is not what was planned"
        return first

    async def close(self) -> None:
        await self._channel.close()


class Http(asyncio.Protocol):
    """A connection to the gateway that is kept; one request at a time.

    Bytes are only gathered while they come, and checked by who asked, after the clock has stopped.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, port: int) -> "Http":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Sends a request and waits for the end of its answer. Raises AnswerFailed."""
        assert self._transport is not None
        self.status, self.first_at, self._pieces = 0, 0.0, list[bytes]()
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.began = time.perf_counter()
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._transport.writelines([head.encode(), body])
        await self._done

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    def leave(self) -> None:
        """Closes at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(AnswerFailed("the gateway closed the connection"))
            self._done.exception()  # who left does not ask for it

    def data_received(self, data: bytes) -> None:
        if not self.first_at and _MARK in data:
            self.first_at = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def check(connection: Http, plan: Plan) -> None:
    """Raises AnswerFailed unless the streamed answer is that of `plan`, ended as it should."""
    if connection.status != 200:
        raise AnswerFailed(f"status {connection.status}: {connection.body[:400]!r}")
    *events, last = EventReader().feed(connection.body)
    chunks = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if text != plan.text or ends != ["stop"] or last != b"[DONE]":
        raise AnswerFailed("the streamed answer is not what was planned")


CHAT: Final = "/v1/chat/completions"


async def ask(connection: Http, plan: Plan) -> float:
    """Reads a streamed answer to its end; returns the seconds to its first text."""
    await connection.send("POST", CHAT, plan.body())
    return connection.first_at - connection.began


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _one_after_the_other(port: int) -> None:
    connection = await Http.open(port)
    while True:
        await ask(connection, BACKGROUND)


async def _background(port: int) -> None:
    print(json.dumps({"event": "ready", "port": port}), flush=True)
    await asyncio.gather(*(_one_after_the_other(port) for _ in range(BACKGROUND_STREAMS)))


def main() -> None:
    """Asks for paced streams, one after the other on each connection."""
    uvloop.run(_background(int(sys.argv[1])))


if __name__ == "__main__":
    main()
