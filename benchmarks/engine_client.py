"""One streaming chat request, timed where its text arrives. Reads raw, so that it costs little."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools

_READ_BYTES = 1 << 16
_ERROR_SHOWN = 400


class AnswerFailed(Exception):
    """A request that did not end as it should; one such ends the whole measurement."""


@dataclass(frozen=True)
class Server:
    """Where to send requests: `url` with or without `/v1`."""

    url: str
    api_key: str = "none"

    @property
    def _split(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        return self._split.hostname or "127.0.0.1"

    @property
    def secure(self) -> bool:
        return self._split.scheme == "https"

    @property
    def port(self) -> int:
        return self._split.port or (443 if self.secure else 80)

    @property
    def path(self) -> str:
        return self._split.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"

    def head(self, length: int) -> bytes:
        """The head of a POST with a body of `length` bytes."""
        lines = (
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            f"Authorization: Bearer {self.api_key}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode()


@dataclass(frozen=True)
class Answer:
    """What was seen of one answer; all moments are of `time.perf_counter`.

    Attributes:
        arrivals: moments at which text came, one for all text that came at once.
        pieces: events that carried text; most servers send one a token.
        completion_tokens: as the server's usage says.
    """

    began: float
    arrivals: tuple[float, ...]
    ended: float
    pieces: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def first_after(self) -> float:
        """Seconds from sending to the first text."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> tuple[tuple[float, float], ...]:
        """Each wait for further text: the moment of its end, and its seconds."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return tuple((after, after - before) for before, after in pairs)


class EventReader:
    """Cuts a stream of server-sent events into their data, however the bytes are split."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each event that is whole now; comments and other fields give none."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                yield b"\n".join(lines)


class AnswerReader:
    """Follows one answer from the bytes of its HTTP response. Raises AnswerFailed."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._events = EventReader()
        self._http = httptools.HttpResponseParser(self)
        self._new: list[bytes] = []
        self._refusal = b""
        self._arrivals: list[float] = []
        self._pieces = 0
        self._usage: dict[str, Any] = {}
        self.complete = False

    @property
    def has_text(self) -> bool:
        return bool(self._arrivals)

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes that came at the moment `now`."""
        self._new.clear()
        self._http.feed_data(data)
        before = self._pieces
        for event in self._events.feed(b"".join(self._new)):
            self._take(event)
        if self._pieces > before:
            self._arrivals.append(now)

    def on_body(self, body: bytes) -> None:
        """For the parser: some bytes of the response's body."""
        if self._http.get_status_code() == 200:
            self._new.append(body)
        else:
            self._refusal += body

    def answer(self, new_tokens: int | None) -> Answer:
        """The answer once the connection has ended; `new_tokens` is the length it must have."""
        if self._refusal:
            status, words = self._http.get_status_code(), self._refusal[:_ERROR_SHOWN]
            raise AnswerFailed(f"status {status}: {words.decode(errors='replace')}")
        if not self.complete or not self._arrivals:
            raise AnswerFailed("the answer ended early, or held no text")
        completion = int(self._usage.get("completion_tokens", -1))
        if completion != (new_tokens or completion):
            raise AnswerFailed(f"{completion} tokens came, not {new_tokens} as asked for")
        ended = self._arrivals[-1]
        prompt = int(self._usage.get("prompt_tokens", -1))
        arrivals = tuple(self._arrivals)
        return Answer(self._began, arrivals, ended, self._pieces, prompt, completion)

    def _take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self.complete = True
            return
        chunk = json.loads(event)
        if "error" in chunk:
            words = event[:_ERROR_SHOWN].decode(errors="replace")
            raise AnswerFailed(f"an error in the stream: {words}")
        for choice in chunk["choices"]:
            self._pieces += bool(choice["delta"].get("content"))
        self._usage = chunk.get("usage") or self._usage


async def ask(
    server: Server,
    body: bytes,
    new_tokens: int | None = None,
    speaking: asyncio.Event | None = None,
) -> Answer:
    """Sends one request and reads its answer to the end; sets `speaking` once there is text.

    Raises AnswerFailed, also where the answer's length is not `new_tokens`.
    """
    reader = AnswerReader(time.perf_counter())
    try:
        stream, writer = await asyncio.open_connection(
            server.host, server.port, ssl=server.secure or None
        )
        try:
            writer.write(server.head(len(body)))
            writer.write(body)
            while data := await stream.read(_READ_BYTES):
                reader.feed(data, time.perf_counter())
                if speaking and reader.has_text:
                    speaking.set()
        finally:
            writer.close()
    except (OSError, ValueError, LookupError, httptools.HttpParserError) as error:
        raise AnswerFailed(f"{server.url}: {type(error).__name__}: {error}") from error
    return reader.answer(new_tokens)
