"""The application: its routes and what they share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import chiasm
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc import mtls
from chiasm.rpc.certificates import Certificates, certificates_of, followed
from chiasm.rpc.channel import open_channel
from chiasm.rpc.secure_channel import ClientTls
from chiasm.telemetry import new_registry
from chiasm.v1.llm_service_pb2 import VISION_SOURCE_NONE
from gateway.chat import Chat
from gateway.completions import Completions
from gateway.fetch.lookup import SystemLookup
from gateway.http.body import BodyBudget
from gateway.http.cors import Cors
from gateway.http.guarded import Guarded
from gateway.http.observed import Observed, exchange_of
from gateway.http.told import Told
from gateway.image_embeddings import ImageEmbeddings
from gateway.keys.ring import KeyRing
from gateway.llm import Card, Llm
from gateway.metrics import GatewayMetrics
from gateway.openai.errors import plain_error
from gateway.openai.translate import check_model
from gateway.openai.url_pictures import url_pictures
from gateway.openapi.route import OpenApi
from gateway.page.page import page_routes
from gateway.responses import Responses
from gateway.settings import GatewaySettings
from gateway.tokens import Tokens

_CARD_OF_A_SCRAPE_SECONDS: Final = 0.25
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
    completions: Completions
    responses: Responses
    tokens: Tokens
    images: ImageEmbeddings
    openapi: OpenApi
    metrics: GatewayMetrics
    readiness: Readiness


def create_app(
    settings: GatewaySettings,
    readiness: Readiness | None = None,
    registry: CollectorRegistry | None = None,
) -> Starlette:
    """The gateway as an ASGI application. Its lifespan holds the channel to the LLM service.

    Raises KeysFileError, MtlsFileError.
    """
    registry = new_registry() if registry is None else registry
    certificates = certificates_of(settings.mtls_files)
    tls = _tls(settings, certificates)
    metrics = GatewayMetrics(registry)
    keys = None if settings.keys_file is None else KeyRing(settings.keys_file)
    routes = [*_ROUTES, *(page_routes() if settings.page else [])]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        channel = open_channel(settings.llm, tls)
        llm, budget = Llm(channel), BodyBudget(settings.max_held_body_bytes)
        metrics.held_bytes.set_function(lambda: budget.held)
        lookup = SystemLookup(settings.url_downloads)
        urls = url_pictures(settings, budget, lookup, metrics)
        chat = Chat(settings, llm, metrics, budget, urls)
        images = ImageEmbeddings(settings, llm, budget, chat.card_of, urls)
        responses = Responses(settings, metrics, budget, chat)
        completions = Completions(settings, llm, metrics, budget, chat.card_of)
        tokens = Tokens(settings, llm, budget, chat.card_of, urls)
        openapi, ready = OpenApi(routes, settings), readiness or Readiness()
        gateway = Gateway(
            llm, chat, completions, responses, tokens, images, openapi, metrics, ready
        )
        try:
            async with _following(keys), followed(certificates, registry):
                yield {"gateway": gateway}
        finally:
            lookup.close()
            await channel.close()

    app = Starlette(
        routes=routes,
        middleware=_layers(settings, metrics, keys),
        exception_handlers={HTTPException: _say_http_error},
        lifespan=lifespan,
    )
    # A redirect would lose the body of a POST.
    app.router.redirect_slashes = False
    return app


def _tls(settings: GatewaySettings, certificates: Certificates | None) -> ClientTls | None:
    if certificates is None:
        return None
    return ClientTls(certificates.latest, mtls.server_names(settings.mtls_llm))


def _layers(
    settings: GatewaySettings, metrics: GatewayMetrics, keys: KeyRing | None
) -> list[Middleware]:
    """Outermost first: see `gateway.http.observed`."""
    cors = [Middleware(Cors, settings.origins)] if settings.origins else []
    active = settings.max_active_requests
    return [
        Middleware(Observed, metrics, settings.max_json_depth),
        *cors,
        Middleware(Told, settings.body_timeout_seconds),
        Middleware(Guarded, keys, settings.open_paths, active),
    ]


@asynccontextmanager
async def _following(keys: KeyRing | None) -> AsyncIterator[None]:
    """Keeps the keys as their file has them while open."""
    if keys is None:
        yield
        return
    following = asyncio.create_task(keys.follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _chat_completions(request: Request) -> Response:
    return await _gateway(request).chat.answer(request)


async def _responses(request: Request) -> Response:
    return await _gateway(request).responses.answer(request)


async def _completions(request: Request) -> Response:
    return await _gateway(request).completions.answer(request)


async def _tokenize(request: Request) -> Response:
    return await _gateway(request).tokens.tokenize(request)


async def _detokenize(request: Request) -> Response:
    return await _gateway(request).tokens.detokenize(request)


async def _openapi(request: Request) -> Response:
    return await _gateway(request).openapi.answer()


async def _version(_: Request) -> Response:
    return JSONResponse({"version": chiasm.__version__})


async def _image_embeddings(request: Request) -> Response:
    return await _gateway(request).images.hold(request)


async def _embeddings(request: Request) -> Response:
    return await _gateway(request).images.pool(request)


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
    gateway = _gateway(request)
    if gateway.llm.known is None:
        # Nobody has asked yet; a scrape does not wait for a service that is not there.
        with suppress(ChiasmError, TimeoutError):
            async with asyncio.timeout(_CARD_OF_A_SCRAPE_SECONDS):
                await _card(request)
    if gateway.llm.known is not None:
        gateway.metrics.model.tell(gateway.llm.known.model_id)
    body = generate_latest(gateway.metrics.registry)
    return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})


_ROUTES: Final = [
    Route("/v1/chat/completions", _chat_completions, methods=["POST"]),
    Route("/v1/responses", _responses, methods=["POST"]),
    Route("/v1/completions", _completions, methods=["POST"]),
    Route("/tokenize", _tokenize, methods=["POST"]),
    Route("/detokenize", _detokenize, methods=["POST"]),
    Route("/version", _version, methods=["GET"]),
    Route("/openapi.json", _openapi, methods=["GET"]),
    Route("/v1/image_embeddings", _image_embeddings, methods=["POST"]),
    Route("/v1/embeddings", _embeddings, methods=["POST"]),
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
        "max_model_len": card.context_length,
        "chiasm": _takes(card),
    }


def _takes(card: Card) -> dict[str, Any]:
    """What the model takes beside text, for clients that make embeddings themselves."""
    identity = card.encoder_identity
    needs = {"image_grid_thw": card.needs_grid_thw, "image_sizes": card.needs_image_size}
    return {
        "family": card.family,
        "title": card.family_title,
        "context_length": card.context_length,
        "images": card.vision_source != VISION_SOURCE_NONE,
        "max_images": card.max_image_count,
        "image_options": list(card.image_options),
        "image_embeds": {
            "width": identity.width * (1 + card.level_count),
            "levels": card.level_count,
            "needs": [name for name, needed in needs.items() if needed],
            "weights_digest": identity.weights_digest,
            "processor_digest": identity.processor_digest,
            "background": identity.background,
        },
        "reference_seconds": card.reference_seconds,
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
