"""HTTP as it is on the wire, for what clients hide: chunks, order, closing."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

SECONDS = 10.0


@dataclass(frozen=True)
class Answer:
    """One answer. `chunks` are the pieces of a chunked body; `length` is what its head states."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: tuple[bytes, ...]

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The data of each event of a stream; comments are left out."""
        pieces = self.body.decode().split("\n\n")
        assert pieces.pop() == ""
        told = [piece for piece in pieces if not piece.startswith(":")]
        assert all(piece.startswith("data: ") for piece in told)
        return [piece.removeprefix("data: ") for piece in told]


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        lines = (await self._within(self._reader.readuntil(b"\r\n\r\n"))).decode("latin-1")
        first, *fields = lines.removesuffix("\r\n\r\n").split("\r\n")
        pairs = [field.split(": ", 1) for field in fields]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs), "a header came twice"
        return int(first.split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next piece of a chunked body; empty at its end."""
        size = int(await self._within(self._reader.readuntil(b"\r\n")), 16)
        piece = await self._within(self._reader.readexactly(size + 2))
        return piece[:-2]

    async def answer(self, method: str = "POST") -> Answer:
        """The next answer whole, to the end that its head states."""
        status, headers = await self.head()
        chunks: list[bytes] = []
        if headers.get("transfer-encoding") == "chunked":
            while piece := await self.chunk():
                chunks.append(piece)
            body = b"".join(chunks)
        elif method == "HEAD":
            body = b""
        else:
            count = int(headers.get("content-length", "0"))
            body = await self._within(self._reader.readexactly(count))
        return Answer(status, headers, body, tuple(chunks))

    async def rest(self) -> bytes:
        """All that still comes until the gateway closes the connection."""
        return await self._within(self._reader.read())

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Breaks the connection without a farewell."""
        self._writer.transport.abort()

    async def _within(self, reading: Any) -> bytes:
        data: bytes = await asyncio.wait_for(reading, SECONDS)
        return data


@asynccontextmanager
async def wired(port: int) -> AsyncIterator[Wire]:
    """A connection to a port of loopback."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wire = Wire(reader, writer)
    try:
        yield wire
    finally:
        wire.close()


def request(
    method: str,
    path: str,
    body: bytes = b"",
    *,
    version: str = "1.1",
    headers: tuple[str, ...] = (),
) -> bytes:
    """The bytes of a request whose body's length is stated."""
    lines = [f"{method} {path} HTTP/{version}", "host: x", *headers]
    if body or method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chat(fields: dict[str, Any], *, version: str = "1.1", headers: tuple[str, ...] = ()) -> bytes:
    """The bytes of a chat request."""
    body = json.dumps(fields).encode()
    return request("POST", "/v1/chat/completions", body, version=version, headers=headers)
