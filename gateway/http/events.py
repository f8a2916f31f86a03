"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.body import unless_gone

DONE: Final = b"data: [DONE]\n\n"
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of the nginx family would gather the events otherwise.
    "x-accel-buffering": "no",
}


def event(body: dict[str, Any]) -> bytes:
    """One event that carries `body` as JSON."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: %b\n\n" % text.encode()


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
        async with aclosing(self._events):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for item in self._events:
            await send({"type": "http.response.body", "body": item, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
