"""Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.body import unless_gone
from gateway.http.protocol import UNBOUNDED, Unbounded

DONE: Final = b"data: [DONE]\n\n"
# A comment: clients skip it.
KEEP_ALIVE: Final = b": keep-alive\n\n"
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies of the nginx family would gather the events otherwise.
    "x-accel-buffering": "no",
}


def event(body: dict[str, Any]) -> bytes:
    """One event that carries `body` as JSON. Numbers are finite: JSON has no others."""
    return b"data: %b\n\n" % to_json(body)


class TextEvent:
    """An event of which only one text changes: what stands around that is encoded once.

    `body` has an empty text where the others will stand, in a field `name` that is its first such.
    """

    def __init__(self, body: dict[str, Any], name: str) -> None:
        # Within the texts of a JSON every quote is escaped, so this is a field and no part of one.
        self._before, field, self._after = event(body).partition(b'"%b":""' % name.encode())
        self._before += field.removesuffix(b'""')

    def of(self, text: str) -> bytes:
        """The event with `text` in its place."""
        return b"%b%b%b" % (self._before, to_json(text), self._after)


class EventStream(Response):
    """Sends its headers at once, then each item of `events` as it comes.

    While none comes, a comment is sent after `keep_alive_seconds` to twice as long, since proxies
    cut connections that are silent. If the caller leaves, `events` is cancelled where it waits; it
    is always closed.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive_seconds: float = 5.0,
    ) -> None:
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds
        self._silent = False
        self.status_code = 200
        self.background = None
        self.init_headers({**_HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unbounded: Unbounded | None = scope["state"].get(UNBOUNDED)
        async with aclosing(self._events):
            await unless_gone(receive, self._send_each(send, unbounded))

    async def _send_each(self, send: Send, unbounded: Unbounded | None) -> None:
        if unbounded is not None:
            unbounded.begin()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        keeping = asyncio.create_task(self._keep_alive(send))
        more = True
        try:
            async for item in self._events:
                self._silent = False
                # What is known to be the last goes out in one piece with the end of the answer.
                more = unbounded is not None or not item.endswith(DONE)
                if not more:
                    keeping.cancel()  # or it might speak after the end
                await send({"type": "http.response.body", "body": item, "more_body": more})
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
        if unbounded is not None:
            unbounded.end()
        if more:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(self._keep_alive_seconds)
            if self._silent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
