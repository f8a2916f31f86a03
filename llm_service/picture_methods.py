"""The methods about one picture: hold its features, or make one vector of them."""

import asyncio
import time

import torch

from chiasm import wire
from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import ImageContract
from chiasm.rpc import limits
from chiasm.rpc.server import Call
from chiasm.v1 import image_pb2, llm_service_pb2
from llm_service.admission import Permits
from llm_service.embeddings import Rows
from llm_service.holding.frame import to_message
from llm_service.pictures import PictureReader, Ready
from llm_service.references import References
from llm_service.request import (
    AboutAPicture,
    Picture,
    as_one_part,
    check_model,
    read_picture,
)
from llm_service.settings import LlmSettings
from llm_service.vision.source import Asked

_S = llm_service_pb2


class PictureMethods:
    """`HoldEmbedding` and `PoolImage`; each takes a permit, as an answer does."""

    def __init__(
        self,
        settings: LlmSettings,
        contract: ImageContract,
        pictures: PictureReader,
        references: References,
        permits: Permits,
    ) -> None:
        self._settings = settings
        self._contract = contract
        self._pictures = pictures
        self._references = references
        self._permits = permits

    async def hold(
        self, request: wire.Wired[llm_service_pb2.HoldEmbeddingRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.HoldEmbeddingResponse]:
        """Holds the features of a picture."""
        message = request.message
        with self._permits.hold(), as_one_part():
            picture, ready = await self._ready(message, request.buffers, call)
            if message.return_features:
                check_unary(ready.rows)
            held = await self._references.hold(picture, ready.rows, message.tenant)
        buffers = wire.Buffers()
        features = buffers if message.return_features else None
        reply = _S.HoldEmbeddingResponse(
            reference=image_pb2.EmbeddingReference(id=held.id),
            embedding=to_message(ready.rows, self._contract.expected_identity, features),
            expires_unix_seconds=int(held.expires_at),
            path=ready.path(),
        )
        return wire.Wired(reply, buffers)

    async def pool(
        self, request: wire.Wired[llm_service_pb2.PoolImageRequest], call: Call
    ) -> wire.Wired[llm_service_pb2.PoolImageResponse]:
        """One vector of a picture."""
        with self._permits.hold(), as_one_part():
            _, ready = await self._ready(request.message, request.buffers, call)
            # Reads every byte: milliseconds, so not on the event loop.
            values = await asyncio.to_thread(lambda: pooled(ready.rows.rows).tolist())
        return wire.plain(_S.PoolImageResponse(values=values, path=ready.path()))

    async def _ready(
        self, message: AboutAPicture, buffers: wire.Buffers, call: Call
    ) -> tuple[Picture, Ready]:
        check_model(message.model, self._settings.served_name)
        picture, tenant = read_picture(message, buffers)
        (measured,) = await self._pictures.measure([picture], tenant)
        ours = time.monotonic() + self._settings.request_timeout_seconds
        deadline = ours if call.deadline is None else min(ours, call.deadline)
        (ready,) = await self._pictures.fetch([measured], Asked(tenant, call.request_id, deadline))
        call.notes.update(images=1, rows=ready.rows.form.row_count)
        return picture, ready


def pooled(rows: torch.Tensor) -> torch.Tensor:
    """The mean of `rows` `[n, width]` divided by its Euclidean length, float64 `[width]`.

    All zeros where the mean is. The largest value is divided out first, so that squares of large
    values stay finite.
    """
    mean = rows.mean(dim=0, dtype=torch.float64)
    largest = mean.abs().max()
    if largest == 0:
        return mean
    scaled = mean / largest
    return scaled / (scaled @ scaled).sqrt()


def check_unary(rows: Rows) -> None:
    """Raises TENSOR_TOO_LARGE for features that fit no single message."""
    if rows.byte_count > limits.MAX_UNARY_TENSOR_BYTES:
        raise ChiasmError(
            Reason.TENSOR_TOO_LARGE,
            f"The features have {rows.byte_count} bytes; a reply holds "
            f"{limits.MAX_UNARY_TENSOR_BYTES}. Leave return_features out, or ask an encoder "
            "service for them by EncodeImageStream.",
            "return_features",
        )
