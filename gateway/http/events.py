"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.body import unless_gone

DONE: Final = b"data: [DONE]\n\n"
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of the nginx family would gather the events otherwise.
    "x-accel-buffering": "no",
}


def event(body: dict[str, Any]) -> bytes:
    """One event that carries `body` as JSON."""
    return b"data: %b\n\n" % _ENCODER.encode(body).encode()


class EventStream(Response):
    """Sends its headers at once, then each item of `events` as it comes.

    If the caller leaves, `events` is cancelled where it waits; it is always closed.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_all = self._send_at_once if scope["http_version"] == "1.0" else self._send_each
        async with aclosing(self._events):
            await unless_gone(receive, send_all(send))

    async def _send_each(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for item in self._events:
            await send({"type": "http.response.body", "body": item, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_at_once(self, send: Send) -> None:
        """For HTTP/1.0, which has no chunks: only a stated length tells where the answer ends."""
        body = b"".join([item async for item in self._events])
        self.headers["content-length"] = str(len(body))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
