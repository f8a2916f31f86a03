"""`POST /v1/image_embeddings` (features held and sent back) and `POST /v1/embeddings` (one vector).

The first takes JSON, or a safetensors body of one tensor a picture, and answers with JSON or, for
`Accept: application/x-safetensors`, with such a body.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pybase64
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.tensors import Array
from chiasm.v1 import image_pb2, llm_service_pb2
from gateway.containers import ContainerError
from gateway.http.body import BodyBudget, read_body, unless_gone
from gateway.http.observed import Exchange, exchange_of
from gateway.llm import Card, Llm
from gateway.openai import paths
from gateway.openai.embeds import check_shape, decoded, fault, split
from gateway.openai.errors import invalid
from gateway.openai.schema import Body, Text
from gateway.openai.url_pictures import UrlPictures
from gateway.picture_items import Asked, Item, Pictures, as_parts, read_pictures
from gateway.safetensors import (
    MEDIA_TYPE,
    StoredEmbedding,
    read_safetensors_items,
    write_safetensors,
)
from gateway.settings import GatewaySettings

_S = llm_service_pb2
T = TypeVar("T")
CardOf = Callable[[str, str], Awaitable[Card]]
"""The card of a model, by its name and the request's id."""
_AT_ONCE: Final = 4  # pictures of one request, so that one request does not fill the encoders
_DTYPES: Final = ("float32", "float16", "bfloat16")


class HoldRequest(Body):
    """The fields beside the pictures. `dtype` is the type of the features that are sent back."""

    model: Text = ""
    encoding_format: Literal["reference", "base64"] = "reference"
    dtype: Literal["float32", "float16", "bfloat16"] | None = None


class PoolRequest(Body):
    """The fields beside the pictures."""

    model: Text
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


@dataclass(frozen=True)
class Wanted:
    """The form in which features are sent back, if at all."""

    binary: bool
    base64: bool
    dtype: str | None

    @property
    def features(self) -> bool:
        return self.binary or self.base64


class ImageEmbeddings:
    """Answers both routes with one LLM service."""

    def __init__(
        self,
        settings: GatewaySettings,
        llm: Llm,
        budget: BodyBudget,
        card_of: CardOf,
        urls: UrlPictures,
    ) -> None:
        self._settings = settings
        self._llm = llm
        self._budget = budget
        self._card_of = card_of
        self._urls = urls

    async def hold(self, request: Request) -> Response:
        """`POST /v1/image_embeddings`."""
        exchange = exchange_of(request.scope)
        binary = MEDIA_TYPE in request.headers.get("accept", "").lower()
        uploaded = request.headers.get("content-type", "").lower().startswith(MEDIA_TYPE)
        with self._budget.lease() as lease:
            limit = self._settings.max_body_bytes
            body = await read_body(request, limit, lease, json=not uploaded)
            if uploaded:
                model = request.query_params.get("model", "")
                work = self._hold_upload(body, model, binary, exchange)
            else:
                work = self._hold_pictures(body, binary, exchange)
            return await unless_gone(request.receive, work)

    async def pool(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        exchange = exchange_of(request.scope)
        with self._budget.lease() as lease:
            body = await read_body(request, self._settings.max_body_bytes, lease)
            work = self._pool(body, exchange)
            return JSONResponse(await unless_gone(request.receive, work))

    async def _hold_pictures(self, body: bytearray, binary: bool, exchange: Exchange) -> Response:
        pictures = await read_pictures(body, messages=False)
        fields = _validated(HoldRequest, pictures)
        wanted = Wanted(binary, fields.encoding_format == "base64", fields.dtype)
        card = await self._card(fields.model, exchange)
        with self._urls.room() as room:
            asked = await as_parts(pictures, card, self._urls, room)
            return await self._held(asked, wanted, card.model_id, exchange)

    async def _hold_upload(
        self, body: bytearray, model: str, binary: bool, exchange: Exchange
    ) -> Response:
        card = await self._card(model, exchange)
        limits = self._settings.pictures
        try:
            view = memoryview(body)
            stored = await decoded(
                len(body), lambda: read_safetensors_items(view, limits.max_embedding_bytes)
            )
        except ContainerError as error:
            raise fault(error, None) from None
        most = min(limits.max_images, card.max_image_count)
        if len(stored) > most:
            text = f"The body has {len(stored)} tensors; the limit is {most}."
            raise ChiasmError(Reason.TOO_MANY_IMAGES, text, None)
        asked = [_uploaded(one, card) for one in stored]
        return await self._held(asked, Wanted(binary, False, None), card.model_id, exchange)

    async def _held(
        self, asked: Sequence[Asked], wanted: Wanted, model: str, exchange: Exchange
    ) -> Response:
        async def ask(one: Asked) -> wire.Wired[llm_service_pb2.HoldEmbeddingResponse]:
            message = _S.HoldEmbeddingRequest(
                model=model, part=one.part, return_features=wanted.features
            )
            return await self._llm.hold(wire.Wired(message, one.buffers), **self._how(exchange))

        replies = await _all([_told(one, ask) for one in asked])
        exchange.notes["images"] = len(replies)
        exchange.notes["prompt_tokens"] = sum(
            reply.message.path.placeholder_count for reply in replies
        )
        size = sum(reply.buffers.byte_count for reply in replies)
        return await decoded(size, lambda: _answer(replies, wanted, model))

    async def _pool(self, body: bytearray, exchange: Exchange) -> dict[str, Any]:
        pictures = await read_pictures(body, messages=True)
        fields = _validated(PoolRequest, pictures)
        card = await self._card_of(fields.model, exchange.request_id)
        width = card.encoder_identity.width
        if fields.dimensions not in {None, width}:
            text = f"The vectors of this model have {width} dimensions; leave the field out."
            raise ChiasmError(Reason.UNSUPPORTED, text, "dimensions")

        async def ask(one: Asked) -> llm_service_pb2.PoolImageResponse:
            message = _S.PoolImageRequest(model=card.model_id, part=one.part)
            how = self._how(exchange)
            return (await self._llm.pool(wire.Wired(message, one.buffers), **how)).message

        with self._urls.room() as room:
            asked = await as_parts(pictures, card, self._urls, room)
            replies = await _all([_told(one, ask) for one in asked])
        exchange.notes["images"] = len(replies)
        tokens = sum(reply.path.placeholder_count for reply in replies)
        exchange.notes["prompt_tokens"] = tokens
        return {
            "object": "list",
            "model": card.model_id,
            "data": [
                _vector(number, reply, fields.encoding_format, one.item)
                for number, (reply, one) in enumerate(zip(replies, asked, strict=True))
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    async def _card(self, model: str, exchange: Exchange) -> Card:
        if not model:  # whatever is served
            return await self._llm.card(exchange.request_id)
        return await self._card_of(model, exchange.request_id)

    def _how(self, exchange: Exchange) -> dict[str, Any]:
        left = exchange.seconds_left(self._settings.request_timeout_seconds)
        return {"request_id": exchange.request_id, "tenant": exchange.tenant, "seconds": left}


def _answer(
    replies: Sequence[wire.Wired[llm_service_pb2.HoldEmbeddingResponse]], wanted: Wanted, model: str
) -> Response:
    items = [described(number, reply.message) for number, reply in enumerate(replies)]
    arrays = [_returned(reply, wanted.dtype) for reply in replies] if wanted.features else []
    if wanted.binary:
        shaped = [item | form(array) for item, array in zip(items, arrays, strict=True)]
        return Response(write_safetensors(arrays, shaped), media_type=MEDIA_TYPE)
    if wanted.base64:
        items = [
            item | form(array) | {"data": pybase64.b64encode(array.data).decode()}
            for item, array in zip(items, arrays, strict=True)
        ]
    return JSONResponse({"object": "list", "model": model, "data": items})


def described(number: int, reply: llm_service_pb2.HoldEmbeddingResponse) -> dict[str, Any]:
    """What is told of one held embedding, without its elements."""
    embedding = reply.embedding
    source = _S.ImageSource.Name(reply.path.source).removeprefix("IMAGE_SOURCE_").lower()
    grid, size = embedding.grid_thw, embedding.image_size
    return {
        "object": "image_embedding",
        "index": number,
        "reference": reply.reference.id,
        "expires_at": reply.expires_unix_seconds,
        "row_count": embedding.row_count,
        "placeholder_count": embedding.placeholder_count,
        "shape": [*_shape(embedding)],
        "dtype": tensors.BY_WIRE[embedding.features.data_type].name,
        "identity": identity_json(embedding),
        "image_size": [size.height, size.width] if embedding.HasField("image_size") else None,
        "grid_thw": [grid.temporal, grid.height, grid.width]
        if embedding.HasField("grid_thw")
        else None,
        "source": source,
    }


def identity_json(embedding: image_pb2.ImageEmbedding) -> dict[str, Any] | None:
    """Who made the features; None if that was not told or checked."""
    if not embedding.HasField("identity"):
        return None
    identity = embedding.identity
    return {
        "model_id": identity.model_id,
        "weights_digest": identity.weights_digest,
        "processor_digest": identity.processor_digest,
        "dtype": tensors.BY_WIRE[identity.data_type].name,
        "width": identity.width,
        "background": identity.background,
    }


def form(array: Array) -> dict[str, Any]:
    """Shape and type of what is sent back."""
    return {"shape": list(array.shape), "dtype": array.data_type.name}


def joined(arrays: Sequence[Array]) -> Array:
    """Features and levels `[rows, width]` side by side, the form in which requests take them."""
    if len(arrays) == 1:
        return arrays[0]
    whole = np.concatenate([array.storage for array in arrays], axis=1)
    return tensors.from_numpy(whole, arrays[0].data_type.name)


def cast(array: Array, dtype: str | None) -> Array | None:
    """`array` in the type asked for; None where that would round."""
    if dtype is None or dtype == array.data_type.name:
        return array
    return tensors.from_numpy(array.to_float32()) if dtype == "float32" else None


def _shape(embedding: image_pb2.ImageEmbedding) -> tuple[int, int]:
    width = embedding.features.shape[-1]
    return embedding.row_count, width * (1 + len(embedding.levels))


def _returned(reply: wire.Wired[llm_service_pb2.HoldEmbeddingResponse], dtype: str | None) -> Array:
    embedding = reply.message.embedding
    arrays = [
        tensors.from_wire(tensor, reply.data(tensor.data))
        for tensor in (embedding.features, *embedding.levels)
    ]
    found = cast(joined(arrays), dtype)
    if found is None:
        has = arrays[0].data_type.name
        kinds = " or ".join(dict.fromkeys((has, "float32")))
        text = f"The features are {has} and would be rounded; ask for {kinds}."
        raise ChiasmError(Reason.UNSUPPORTED, text, "dtype")
    return found


def _vector(
    number: int, reply: llm_service_pb2.PoolImageResponse, encoding: str, item: Item
) -> dict[str, Any]:
    values = np.array(reply.values, "<f4")
    if not len(values) or not np.isfinite(values).all():
        # No vector is better than one that poisons an index.
        raise ChiasmError(Reason.INTERNAL, "The vector of this picture is not finite.", item.place)
    told: Any = values.tolist()
    if encoding == "base64":
        told = pybase64.b64encode(values.tobytes()).decode()
    return {"object": "embedding", "index": number, "embedding": told}


async def _told(one: Asked, ask: Callable[[Asked], Coroutine[Any, Any, T]]) -> T:
    try:
        return await ask(one)
    except ChiasmError as error:
        raise one.told(error) from error


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order, a few at once. The first failure ends the others."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def in_turn(call: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await call

    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(in_turn(call)) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


B = TypeVar("B", bound=Body)


def _validated(kind: type[B], pictures: Pictures) -> B:
    try:
        return kind.model_validate(dict(pictures.fields))
    except ValidationError as faults:
        first = faults.errors(include_url=False, include_context=False, include_input=False)[0]
        raise paths.told(first) from None


def _uploaded(one: StoredEmbedding, card: Card) -> Asked:
    name = one.name if one.name.isprintable() and len(one.name) <= 64 else "tensor"
    check_shape(one.array.shape, card, name)
    parts = split(one.array, card.encoder_identity.width) if card.level_count else [one.array]
    buffers = wire.Buffers()
    features, *levels = (
        tensors.to_wire(Array(tensors.BY_NAME[p.dtype], p.shape, p.data), buffers) for p in parts
    )
    embedding = image_pb2.ImageEmbedding(features=features, levels=levels)
    _take_told(embedding, one.told, name)
    return Asked(Item(None, name), _S.Part(embedding=embedding), buffers)


def _take_told(embedding: image_pb2.ImageEmbedding, told: Mapping[str, Any], name: str) -> None:
    """What the body's metadata says of a tensor, as claims for the LLM service to check."""
    size, grid, identity = (told.get(key) for key in ("image_size", "grid_thw", "identity"))
    try:
        if size is not None:
            height, width = size
            embedding.image_size.height, embedding.image_size.width = height, width
        if grid is not None:
            temporal, height, width = grid
            embedding.grid_thw.CopyFrom(
                image_pb2.GridThw(temporal=temporal, height=height, width=width)
            )
        if identity is not None:
            embedding.identity.CopyFrom(
                image_pb2.EncoderIdentity(
                    model_id=identity["model_id"],
                    weights_digest=identity["weights_digest"],
                    processor_digest=identity["processor_digest"],
                    data_type=tensors.BY_NAME[identity["dtype"]].wire,
                    width=identity["width"],
                    background=identity.get("background"),
                )
            )
    except (TypeError, ValueError, KeyError):
        text = (
            "The __metadata__ of a tensor is JSON of image_size [height, width], grid_thw "
            "[t, h, w] and identity, all as this service writes them."
        )
        raise invalid(text, f"__metadata__.{name}") from None
