"""Around every request: its id, its path, its log line and its metrics.

The layers of the application, from the outside:

    Observed     names the request, counts it, writes its line
    Cors         where switched on: answers preflights, marks answers and errors alike
    Told         sends what the layers inside raise, in OpenAI's shape
    Guarded      asks for the key, bounds how much is in hand
    the routes

All are pure ASGI, so that streams pass through untouched.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chiasm import telemetry
from chiasm.errors import ChiasmError
from chiasm.rpc import limits
from chiasm.rpc.context import accepted_request_id
from chiasm.tracing import names, spans
from chiasm.tracing.w3c import TRACE_PARENT, TRACE_STATE, Trace, accepted
from chiasm.v1 import llm_service_pb2
from gateway.keys.allowance import CODE, Charge
from gateway.keys.expected import expected_tokens
from gateway.metrics import GatewayMetrics, route_of

PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
_SLASHES: Final = re.compile("/{2,}")
_ID_HEADER: Final = limits.REQUEST_ID.encode()
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


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
    # That of the failure, where a stream has begun with 200 before.
    failed_status: int = 0
    first_token_at: float = 0.0
    # Deepest nesting that a body of JSON may have.
    max_json_depth: int = 0
    # Whose cache entries, references and aliases the request may use; empty where keys are off.
    tenant: str = ""
    key_name: str = ""
    charge: Charge | None = None
    # Written by the route, read by the log line. Never holds content.
    notes: dict[str, object] = field(default_factory=dict)

    def seconds_left(self, limit: float) -> float:
        """Until the request has taken `limit` seconds; above 0, as a deadline must be."""
        return max(limit - (time.monotonic() - self.began), 0.001)

    def tell(self, error: ChiasmError) -> None:
        limited = error.metadata.get("code") == CODE
        self.reason = "RATE_LIMIT" if limited else error.reason.value
        self.detail = str(error)
        self.failed_status = error.http_status

    def expect(self, *asked: llm_service_pb2.GenerateRequest) -> None:
        """Sets aside tokens of the key's limit for all that is `asked`, until the answers end.

        Called once, before the LLM service is asked. Raises QUEUE_FULL with the code
        `rate_limit_exceeded`.
        """
        if self.charge is not None:
            self.charge.expect(sum(expected_tokens(one) for one in asked))


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that `Observed` put into the scope."""
    exchange: Exchange = scope["chiasm.exchange"]
    return exchange


class Observed:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, max_json_depth: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_json_depth = max_json_depth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _begin(scope)
        exchange.max_json_depth = self._max_json_depth

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                _name(message, exchange)
            await send(message)

        name, begins = _span_name(exchange), exchange.route not in PROBES
        with telemetry.request_context(
            exchange.request_id, _caller_trace(scope), name=name, begins=begins
        ):
            self._metrics.active.inc()
            try:
                await self._app(scope, receive, send_named)
            finally:
                self._metrics.active.dec()
                self._record(exchange)
                _tell_span(spans.current(), exchange)

    def _record(self, exchange: Exchange) -> None:
        seconds = time.monotonic() - exchange.began
        metrics, route = self._metrics, exchange.route
        metrics.requests.labels(route, str(exchange.status), exchange.reason).inc()
        metrics.seconds.labels(route).observe(seconds)
        if exchange.first_token_at:
            metrics.first_token_seconds.observe(exchange.first_token_at - exchange.began)
        probe = route in PROBES and not exchange.reason
        log = telemetry.logger().debug if probe else telemetry.logger().info
        log(
            "request", method=exchange.method, route=route, status=exchange.status,
            ms=round(seconds * 1000, 1), **_whose(exchange), **_why(exchange), **exchange.notes,
        )  # fmt: skip


def _name(message: Message, exchange: Exchange) -> None:
    headers = MutableHeaders(scope=message)
    headers[limits.REQUEST_ID] = exchange.request_id
    if exchange.charge is not None:
        headers.update(exchange.charge.headers())


def _whose(exchange: Exchange) -> dict[str, str]:
    named = {"key": exchange.key_name, "tenant": exchange.tenant}
    return named if exchange.key_name else {}


def _why(exchange: Exchange) -> dict[str, str]:
    told = {"reason": exchange.reason, "detail": exchange.detail}
    return told if exchange.reason else {}


def _caller_trace(scope: Scope) -> Trace:
    """The trace that the caller is in."""
    return accepted(_sent(scope, TRACE_PARENT), _sent(scope, TRACE_STATE))


def _sent(scope: Scope, header: str) -> list[str]:
    wanted = header.encode()
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _span_name(exchange: Exchange) -> str:
    return f"{_method_of(exchange)} {exchange.route}"


def _method_of(exchange: Exchange) -> str:
    return exchange.method if exchange.method in _METHODS else "_OTHER"


def _tell_span(span: spans.Span, exchange: Exchange) -> None:
    if not span.recording:
        return
    span.put({names.HTTP_METHOD: _method_of(exchange), names.HTTP_ROUTE: exchange.route})
    if exchange.status:
        span.put({names.HTTP_STATUS: exchange.status})
    if exchange.reason:
        spans.refused(span, exchange.reason, max(exchange.status, exchange.failed_status))


def _begin(scope: Scope) -> Exchange:
    # Clients join base URL and path with one slash too many or too few.
    scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
    claimed = dict(scope["headers"]).get(_ID_HEADER, b"").strip().decode("latin-1")
    exchange = Exchange(route_of(scope["path"]), scope["method"], accepted_request_id(claimed))
    scope["chiasm.exchange"] = exchange
    return exchange
