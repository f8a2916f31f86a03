"""The application: its routes and what they share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.channel import open_channel
from chiasm.telemetry import new_registry
from gateway.chat import Chat
from gateway.http.body import BodyBudget
from gateway.http.observed import Observed, exchange_of
from gateway.llm import Card, Llm
from gateway.metrics import GatewayMetrics
from gateway.openai.errors import plain_error
from gateway.openai.translate import check_model
from gateway.settings import GatewaySettings

_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


@dataclass
class Readiness:
    """Whether new requests are welcome. While it drains the gateway serves, but says no."""

    draining: bool = False


@dataclass(frozen=True)
class Gateway:
    """What the routes share while the application runs."""

    llm: Llm
    chat: Chat
    registry: CollectorRegistry
    readiness: Readiness


def create_app(
    settings: GatewaySettings,
    readiness: Readiness | None = None,
    registry: CollectorRegistry | None = None,
) -> Starlette:
    """The gateway as an ASGI application. Its lifespan holds the channel to the LLM service."""
    registry = new_registry() if registry is None else registry
    metrics = GatewayMetrics(registry)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        channel = open_channel(settings.llm)
        llm, budget = Llm(channel), BodyBudget(settings.max_held_body_bytes)
        metrics.held_bytes.set_function(lambda: budget.held)
        chat = Chat(settings, llm, metrics, budget)
        try:
            yield {"gateway": Gateway(llm, chat, registry, readiness or Readiness())}
        finally:
            await channel.close()

    app = Starlette(
        routes=_ROUTES,
        middleware=[Middleware(Observed, metrics, settings.max_active_requests)],
        exception_handlers={HTTPException: _say_http_error},
        lifespan=lifespan,
    )
    # A redirect would lose the body of a POST.
    app.router.redirect_slashes = False
    return app


async def _chat_completions(request: Request) -> Response:
    return await _gateway(request).chat.answer(request)


async def _models(request: Request) -> Response:
    card = await _card(request)
    return JSONResponse({"object": "list", "data": [_model_of(card)]})


async def _model(request: Request) -> Response:
    card = await _card(request)
    check_model(request.path_params["id"], card)
    return JSONResponse(_model_of(card))


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(request: Request) -> Response:
    gateway = _gateway(request)
    if gateway.readiness.draining:
        raise ChiasmError(Reason.NOT_READY, "The gateway is stopping; try another replica.")
    if not await gateway.llm.is_serving():
        raise ChiasmError(Reason.NOT_READY, "The LLM service is not ready.")
    return JSONResponse({"status": "ready"})


async def _metrics(request: Request) -> Response:
    body = generate_latest(_gateway(request).registry)
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


_ROUTES: Final = [
    Route("/v1/chat/completions", _chat_completions, methods=["POST"]),
    Route("/v1/models", _models, methods=["GET"]),
    Route("/v1/models/{id:path}", _model, methods=["GET"]),
    Route("/health", _health, methods=["GET"]),
    Route("/ready", _ready, methods=["GET"]),
    Route("/metrics", _metrics, methods=["GET"]),
]


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.state.gateway
    return gateway


async def _card(request: Request) -> Card:
    return await _gateway(request).llm.card(exchange_of(request.scope).request_id)


def _model_of(card: Card) -> dict[str, Any]:
    return {
        "id": card.model_id,
        "object": "model",
        "created": card.ready_unix_seconds,
        "owned_by": "chiasm",
    }


async def _say_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = {
        404: f"There is nothing at this path for {request.method}.",
        405: f"This path does not take {request.method}.",
    }.get(error.status_code, "The request was refused.")
    exchange_of(request.scope).reason = "HTTP"
    body = plain_error(error.status_code, told, _CODES.get(error.status_code))
    return JSONResponse(body, error.status_code, error.headers)
