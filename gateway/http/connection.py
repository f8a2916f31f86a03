"""A connection within bounds: what the HTTP parser alone would let in or wait for.

uvicorn bounds neither the size of a request's head nor the time that it takes, and tells faults of
HTTP itself as plain text. Here both have limits, and such faults have the shape of all errors.
"""

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from uvicorn.server import ServerState

from chiasm import telemetry
from chiasm.rpc import limits
from chiasm.rpc.context import accepted_request_id
from gateway.http.protocol import HttpProtocol
from gateway.openai.errors import plain_error

# How long, and how much of, what still comes is read after a refusal: a connection closed with
# bytes unread is reset, and the caller would lose the answer that says why.
_DISCARD_SECONDS: Final = 2.0
_DISCARD_BYTES: Final = 4 << 20
_LINE_BYTES: Final = 4  # of a header beside name and value: colon, space and line end


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of a connection.

    Attributes:
        header_bytes: of request line and headers together.
        header_count: headers of a request.
        header_seconds: from the first byte of a request to the end of its headers.
        idle_seconds: without a request, or with an answer that nobody reads.
        connections: at once.
    """

    header_bytes: int
    header_count: int
    header_seconds: float
    idle_seconds: float
    connections: int


class ServingConfig(uvicorn.Config):
    """uvicorn's settings with the limits of `Connection`."""

    connection_limits: ConnectionLimits


@dataclass(frozen=True)
class _Fault:
    status: int
    code: str
    text: str


_MALFORMED: Final = _Fault(400, "invalid_http", "This is not a valid HTTP/1.1 request.")
_LATE: Final = _Fault(408, "request_timeout", "The request's headers did not arrive in time.")
_FULL: Final = _Fault(
    503, "not_ready", "The gateway has as many connections as it may; try again shortly."
)


class _HeadTooLargeError(Exception):
    pass


class Connection(HttpProtocol):
    """uvicorn's connection with `ConnectionLimits`. Made by uvicorn with a `ServingConfig`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, ServingConfig)
        self._limits = config.connection_limits
        # Runs while a head is awaited; uvicorn's own runs between requests.
        self._head_clock: asyncio.TimerHandle | None = None
        self._write_clock: asyncio.TimerHandle | None = None
        self._head_begun = False
        self._head_bytes = 0
        self._head_lines = 0
        # Bytes since the parser last had something to tell: a header without an end, a trailer.
        self._untold_bytes = 0
        self._fault: _Fault | None = None
        self._refused = False
        self._discarded = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(_FULL)
        else:
            self._start_head_clock(self._limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_clock()
        self._stop_write_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discard(len(data))
            return
        if self._head_clock is None and self._idle:  # line ends before a request begin none
            self._start_head_clock(self._limits.header_seconds)
        self._untold_bytes += len(data)
        super().data_received(data)
        if self._untold_bytes > self._limits.header_bytes:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_begun, self._head_bytes, self._head_lines = True, 0, 0
        self._start_head_clock(self._limits.header_seconds)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_lines += 1
        self._count(len(name) + len(value) + _LINE_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_clock()
        self._head_begun, self._untold_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._untold_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for all that its parser, or a callback of ours, does not take."""
        self._refuse(self._fault or _MALFORMED)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_clock = self.loop.call_later(self._limits.idle_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_clock()
        super().resume_writing()

    @property
    def _idle(self) -> bool:
        return self.answered is None

    def _count(self, size: int) -> None:
        """Raises, which the parser hands on to uvicorn, for a head, or trailers, too large."""
        self._head_bytes += size
        most = self._limits
        if self._head_bytes > most.header_bytes or self._head_lines > most.header_count:
            self._fault = self._too_large()
            raise _HeadTooLargeError

    def _too_large(self) -> _Fault:
        most = self._limits
        text = (
            f"Request line and headers have more than {most.header_bytes} bytes or "
            f"{most.header_count} headers, the limits here."
        )
        return _Fault(431, "headers_too_large", text)

    def _start_head_clock(self, seconds: float) -> None:
        self._stop_head_clock()
        self._head_clock = self.loop.call_later(seconds, self._head_is_late)

    def _stop_head_clock(self) -> None:
        if self._head_clock is not None:
            self._head_clock.cancel()
            self._head_clock = None

    def _stop_write_clock(self) -> None:
        if self._write_clock is not None:
            self._write_clock.cancel()
            self._write_clock = None

    def _head_is_late(self) -> None:
        if not self._idle:  # the next request waits behind this one, and may
            self._start_head_clock(self._limits.header_seconds)
        elif self._head_begun:
            self._refuse(_LATE)
        else:
            self.transport.close()

    def _refuse(self, fault: _Fault) -> None:
        """Takes nothing more, says why where nothing else is to be said, and closes."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_head_clock()
        log = telemetry.logger()
        log.info("request", route="other", status=fault.status, reason="HTTP", detail=fault.code)
        if self._ends_with_an_answer():
            return
        running = self.answered
        if running is not None and running.response_started:
            self.transport.close()
            return
        if running is not None:  # the route gets to know that nobody waits
            running.disconnected = True
            running.message_event.set()
        self.transport.write(self._answer(fault))
        self.flow.resume_reading()
        self.loop.call_later(_DISCARD_SECONDS, self.transport.close)

    def _ends_with_an_answer(self) -> bool:
        """Whether requests came whole before the fault: they are answered, and that is the end."""
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self.answered
        if last is None or last.more_body:
            return False
        last.keep_alive = False
        return True

    def _discard(self, size: int) -> None:
        self._discarded += size
        if self._discarded > _DISCARD_BYTES:
            self.transport.abort()

    def _answer(self, fault: _Fault) -> bytes:
        body = json.dumps(plain_error(fault.status, fault.text, fault.code)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (limits.REQUEST_ID.encode(), accepted_request_id(None).encode()),
            (b"connection", b"close"),
            *([(b"retry-after", b"1")] if fault.status == 503 else []),
        ]
        line = f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}\r\n".encode()
        return line + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + body
