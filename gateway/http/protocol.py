"""uvicorn's HTTP/1 connection, mended for requests sent ahead, offers to upgrade, and HTTP/1.0."""

import sys
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

UNBOUNDED: Final = "chiasm.unbounded"
# Requests that may wait on one connection before it is read no further.
_MOST_WAITING: Final = 16
_NOT_HTTP: Final = "Invalid HTTP request received."


class Unbounded:
    """An answer whose end is that of its connection, for HTTP/1.0, which has no chunks."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def begin(self) -> None:
        """Before the head is sent: no length is stated."""
        self._cycle.chunked_encoding = False
        self._cycle.expected_content_length = sys.maxsize

    def end(self) -> None:
        """Before the last, empty piece is sent."""
        self._cycle.expected_content_length = 0


class HttpProtocol(HttpToolsProtocol):
    """Tells the request that is answered that its caller has left, whatever was sent after it.

    Requests sent ahead are answered in order. The connection is read on while they wait, or else
    nobody would notice that the caller leaves.

    An offer to go on in another protocol is passed over, as the standard allows. Java's own client
    makes one of HTTP/2 with its first request. The parser takes what follows such a head for the
    other protocol, so it is given the head again without the offer.
    """

    # The request that is answered; `cycle` is the last that came.
    answered: RequestResponseCycle | None = None

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._fed(data)
        except httptools.HttpParserError:
            self.send_400_response(_NOT_HTTP)

    def _fed(self, data: bytes) -> bytes:
        """Gives `data` to the parser; returns what to give it next."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.parser.get_method() != b"CONNECT":
                return self._head_without_offer() + data[offer.args[0] :]
            self.send_400_response(_NOT_HTTP)
        return b""

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % one for one in self.headers if one[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if self.answered is None:
            self.answered = self.cycle
        elif len(self.pipeline) < _MOST_WAITING:
            self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            self.scope["state"][UNBOUNDED] = Unbounded(self.cycle)

    def on_response_complete(self) -> None:
        self.answered = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answered is not None:
            self.answered.disconnected = True
            self.answered.message_event.set()
        super().connection_lost(exc)
