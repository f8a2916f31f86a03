"""Calls to a real service on a real port, and the pictures that they send."""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import numpy as np
import PIL.Image
import torch
from prometheus_client import CollectorRegistry

from chiasm import tensors, torch_tensors
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.v1 import encoder_service_pb2 as pb
from chiasm.v1 import image_pb2
from chiasm.wire import Buffers, Wired
from encoder_service.app import running
from encoder_service.settings import EncoderSettings
from encoder_service.tower import Tower

T = TypeVar("T")


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """A PNG of noise; each seed gives another picture. `size` is width and height."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return png(PIL.Image.fromarray(noise))


def png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def settings_for(checkpoint: Path, **changes: Any) -> EncoderSettings:
    chosen = {"torch_threads": 1, "decode_workers": 2, "model_id": "tiny", **changes}
    return EncoderSettings(model=checkpoint, port=0, **chosen)


class Service:
    """A running service with a channel to it."""

    def __init__(self, port: int, channel: grpc.aio.Channel, registry: CollectorRegistry) -> None:
        self.port = port
        self.channel = channel
        self._registry = registry

    def figure(self, name: str, **labels: str) -> float:
        """A metric's value now; 0 if nothing was counted yet."""
        return self._registry.get_sample_value(f"chiasm_encoder_{name}", labels) or 0.0

    def calls_ended(self, status: str) -> float:
        """EncodeImage calls that ended with a gRPC status, as the server counts them."""
        return sum(
            sample.value
            for metric in self._registry.collect()
            for sample in metric.samples
            if sample.name == "chiasm_rpc_calls_total"
            and sample.labels["method"] == "EncodeImage"
            and sample.labels["status"] == status
        )

    async def encode(
        self, data: bytes, *, deadline: float | None = None, **fields: Any
    ) -> Wired[pb.EncodeImageResponse]:
        return await EncoderMethods.ENCODE_IMAGE.call(
            self.channel, wired(pb.EncodeImageRequest, data, **fields), timeout=deadline
        )

    async def until_active(self, count: int) -> None:
        """Returns once `count` encode calls have no reply yet."""
        await until(lambda load: load.active_call_count == count, self.load)

    async def until_queued(self, count: int) -> None:
        """Returns once `count` pictures wait for the tower."""
        await until(lambda load: load.queued_image_count == count, self.load)

    async def load(self) -> pb.EncoderServiceGetLoadResponse:
        request = Wired(pb.EncoderServiceGetLoadRequest(), Buffers())
        return (await EncoderMethods.GET_LOAD.call(self.channel, request)).message


async def until(is_so: Callable[[T], bool], look: Callable[[], Awaitable[T]]) -> None:
    """Returns once `is_so` is true of what `look` sees; fails after some 10 s."""
    for _ in range(2000):
        seen = await look()
        if is_so(seen):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"it never came to be; last seen: {seen}")


async def until_prepared(service: Service, count: int) -> None:
    """Returns once `count` pictures were prepared, beside the one of the start."""

    async def prepared() -> float:
        return service.figure("stage_seconds_count", stage="preprocess")

    await until(lambda seen: seen == count + 1, prepared)


@asynccontextmanager
async def serving(settings: EncoderSettings, tower: Tower | None = None) -> AsyncIterator[Service]:
    """The service of `settings` on a free port, with a channel to it."""
    async with running(settings, tower=tower) as service:
        channel = open_channel(f"127.0.0.1:{service.port}")
        async with channel:
            yield Service(service.port, channel, service.registry)


def wired(
    kind: Any,
    data: bytes,
    *,
    options: image_pb2.ImageOptions | None = None,
    tenant: str = "",
    expected_identity: image_pb2.EncoderIdentity | None = None,
) -> Wired[Any]:
    buffers = Buffers()
    image = image_pb2.Image(data=buffers.put(data), options=options)
    message = kind(image=image, tenant=tenant, expected_identity=expected_identity)
    return Wired(message, buffers)


def rows_of(response: Wired[pb.EncodeImageResponse]) -> torch.Tensor:
    """The features of a reply."""
    message = response.message.embedding.features
    array = tensors.from_wire(message, response.data(message.data))
    return torch_tensors.to_torch(array).clone()
