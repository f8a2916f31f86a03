"""Around every request: its id, its path, its permit, its errors, its log line and its metrics.

Pure ASGI, so that streams pass through untouched.
"""

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chiasm import telemetry
from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.rpc import limits
from chiasm.rpc.context import accepted_request_id
from gateway.metrics import GatewayMetrics, route_of
from gateway.openai.errors import as_http

_SLASHES: Final = re.compile("/{2,}")
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
_ID_HEADER: Final = limits.REQUEST_ID.encode()
# How long, and how much of, a refused body is read and thrown away. A connection closed with bytes
# unread is reset, and the caller would lose the answer that says why.
_DISCARD_SECONDS: Final = 5.0
_DISCARD_BYTES: Final = 1 << 30


@dataclass
class Exchange:
    """One request on its way; routes add to it by `exchange_of`."""

    route: str
    method: str
    request_id: str
    began: float = field(default_factory=time.monotonic)
    status: int = 0
    reason: str = ""
    detail: str = ""
    first_token_at: float = 0.0
    # Whether the request's body has come to its end.
    body_ended: bool = False
    # Written by the route, read by the log line. Never holds content.
    notes: dict[str, object] = field(default_factory=dict)

    def tell(self, error: ChiasmError) -> None:
        self.reason, self.detail = error.reason.value, str(error)


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that `Observed` put into the scope."""
    exchange: Exchange = scope["chiasm.exchange"]
    return exchange


class Observed:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, max_active: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_active = max_active
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _begin(scope)
        with telemetry.request_context(exchange.request_id):
            self._active += 1
            self._metrics.active.inc()
            try:
                await self._answer(exchange, scope, receive, send)
            finally:
                self._active -= 1
                self._metrics.active.dec()
                self._record(exchange)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)[limits.REQUEST_ID] = exchange.request_id
            await send(message)

        async def receive_noted() -> Message:
            message = await receive()
            exchange.body_ended = not message.get("more_body", False)
            return message

        try:
            self._admit(exchange)
            await self._app(scope, receive_noted, send_named)
        except ChiasmError as error:
            exchange.tell(error)
            await _send_error(error, exchange, scope, receive_noted, send_named)
        except Exception:
            telemetry.logger().exception("fault", route=exchange.route)
            fault = ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
            exchange.tell(fault)
            await _send_error(fault, exchange, scope, receive_noted, send_named)

    def _admit(self, exchange: Exchange) -> None:
        if self._active > self._max_active and exchange.route not in _PROBES:
            text = "The gateway has as many requests in hand as it may; try again shortly."
            raise ChiasmError(Reason.QUEUE_FULL, text, retry_after=1.0)

    def _record(self, exchange: Exchange) -> None:
        seconds = time.monotonic() - exchange.began
        metrics, route = self._metrics, exchange.route
        metrics.requests.labels(route, str(exchange.status), exchange.reason).inc()
        metrics.seconds.labels(route).observe(seconds)
        if exchange.first_token_at:
            metrics.first_token_seconds.observe(exchange.first_token_at - exchange.began)
        probe = route in _PROBES and not exchange.reason
        why = {"reason": exchange.reason, "detail": exchange.detail} if exchange.reason else {}
        log = telemetry.logger().debug if probe else telemetry.logger().info
        log(
            "request", method=exchange.method, route=route, status=exchange.status,
            ms=round(seconds * 1000, 1), **why, **exchange.notes,
        )  # fmt: skip


def _begin(scope: Scope) -> Exchange:
    # Clients join base URL and path with one slash too many or too few.
    scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
    claimed = dict(scope["headers"]).get(_ID_HEADER, b"").decode("latin-1")
    exchange = Exchange(route_of(scope["path"]), scope["method"], accepted_request_id(claimed))
    scope["chiasm.exchange"] = exchange
    return exchange


async def _send_error(
    error: ChiasmError, exchange: Exchange, scope: Scope, receive: Receive, send: Send
) -> None:
    if exchange.status:  # the answer is under way: all that is left is to end it
        return
    told = as_http(error)
    answer = JSONResponse(told.body, told.status, told.headers)
    if exchange.body_ended or scope["method"] not in _WITH_BODY:
        await answer(scope, receive, send)
    else:
        answer.headers["connection"] = "close"
        await _send_then_discard(answer, receive, send)


async def _send_then_discard(answer: Response, receive: Receive, send: Send) -> None:
    start = {
        "type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers,
    }  # fmt: skip
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            await _discard(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    left = _DISCARD_BYTES
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))
