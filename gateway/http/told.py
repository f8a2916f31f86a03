"""Sends what the routes raise, and ends bodies that do not come."""

import asyncio
from contextlib import suppress
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chiasm import telemetry
from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from gateway.http.observed import Exchange, exchange_of
from gateway.openai.errors import as_http, invalid

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
# How long, and how much of, a refused body is read and thrown away. A connection closed with bytes
# unread is reset, and the caller would lose the answer that says why.
_DISCARD_SECONDS: Final = 5.0
_DISCARD_BYTES: Final = 1 << 30


class Told:
    """The layer that makes answers of errors.

    Args:
        body_seconds: time from the start of a request within which its body must have come.
    """

    def __init__(self, app: ASGIApp, body_seconds: float) -> None:
        self._app = app
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, body = exchange_of(scope), _Incoming(receive, self._body_seconds)
        try:
            await self._app(scope, body.receive, send)
        except ChiasmError as error:
            exchange.tell(error)
            await _send_error(error, exchange, body, scope, send)
        except Exception:
            telemetry.logger().exception("fault", route=exchange.route)
            fault = ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
            exchange.tell(fault)
            await _send_error(fault, exchange, body, scope, send)


class _Incoming:
    """A request's body on its way."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._until = asyncio.get_running_loop().time() + seconds
        self._seconds = seconds
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    async def receive(self) -> Message:
        """The next message. Raises REQUEST_INVALID with status 408 for a body that is late."""
        if self._ended:  # what comes now is the caller's leaving
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                return await self._next()
        except TimeoutError:
            raise _late(self._seconds) from None

    async def discard(self) -> None:
        """Reads the rest and throws it away, within bounds."""
        left = _DISCARD_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while left > 0 and not self._ended:
                    left -= len((await self._next()).get("body", b""))

    async def _next(self) -> Message:
        message = await self._receive()
        self._ended = not message.get("more_body", False)
        return message


def _late(seconds: float) -> ChiasmError:
    text = f"The body did not arrive within {seconds:g} seconds, the limit here."
    error = invalid(text, None, "request_timeout")
    error.metadata["http_status"] = "408"
    return error


async def _send_error(
    error: ChiasmError, exchange: Exchange, body: _Incoming, scope: Scope, send: Send
) -> None:
    if exchange.status:  # the answer is under way: all that is left is to end it
        return
    told = as_http(error)
    answer = JSONResponse(told.body, told.status, told.headers)
    if body.ended or scope["method"] not in _WITH_BODY:
        await answer(scope, body.receive, send)
    else:
        answer.headers["connection"] = "close"
        await _send_then_discard(answer, body, send)


async def _send_then_discard(answer: Response, body: _Incoming, send: Send) -> None:
    start = {
        "type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers,
    }  # fmt: skip
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    await body.discard()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
