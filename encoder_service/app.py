"""The process: listen, load, prove with a real picture, serve, drain."""

import asyncio
import io
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import torch
from prometheus_client import CollectorRegistry

from chiasm import telemetry, torch_tensors
from chiasm.embedding_cache import EmbeddingCache
from chiasm.errors import ChiasmError
from chiasm.models.checkpoint import CheckpointError, open_checkpoint
from chiasm.models.contract import DEFAULT_OPTIONS
from chiasm.models.vision import ImageFeatures, VisionHalf
from chiasm.rpc import mtls
from chiasm.rpc.callers import ServerTls
from chiasm.rpc.certificates import Certificates, certificates_of, followed
from chiasm.rpc.health import Health, health_port
from chiasm.rpc.server import Server, serve
from chiasm.settings import shown
from encoder_service.batcher import Batcher, Interest
from encoder_service.metrics import EncoderMetrics
from encoder_service.servicer import EncoderServicer, Loaded
from encoder_service.settings import EncoderSettings
from encoder_service.single_flight import SingleFlight
from encoder_service.tower import Tower


@dataclass(frozen=True)
class Running:
    """A service that is ready."""

    port: int
    metrics_port: int | None
    health_port: int | None
    server: Server
    registry: CollectorRegistry
    broken: asyncio.Event


class EncoderService:
    """The parts of one service, listening before its checkpoint is loaded."""

    def __init__(
        self,
        settings: EncoderSettings,
        registry: CollectorRegistry,
        certificates: Certificates | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = EncoderMetrics(registry)
        telemetry.ServedModel(registry).tell(settings.served_name)
        self._servicer = EncoderServicer(
            settings.image_limits, self._metrics, lambda: self.server.draining
        )
        service = self._servicer.service()
        self.health = Health(service.name)
        tls = None
        if certificates is not None:
            tls = ServerTls(certificates.latest, mtls.callers(settings.mtls_clients))
        self.server = Server(settings.server, service, registry, health=self.health, tls=tls)

    @asynccontextmanager
    async def opened(self, tower: Tower, family: str) -> AsyncIterator[Batcher]:
        """Serves `tower` while open, from the moment that it encoded a real picture.

        Raises CheckpointError if it cannot.
        """
        batcher = Batcher(tower, self._settings.image_limits, self._settings.batcher, self._metrics)
        async with batcher.running():
            await _prove(batcher)
            cache = kept_features(self._settings.cache_bytes, self._metrics)
            flights = SingleFlight(batcher, cache, self._metrics)
            self._servicer.open(Loaded(tower.contract, family, flights, batcher.load, self._name()))
            await self.server.ready()
            yield batcher

    def _name(self) -> str:
        return self._settings.encoder_name or f"{socket.gethostname()}:{self.server.port}"


def kept_features(capacity: int, metrics: EncoderMetrics) -> EmbeddingCache[ImageFeatures]:
    """The cache of an encoder, with its figures."""
    cache: EmbeddingCache[ImageFeatures] = EmbeddingCache(
        capacity, lambda features: features.byte_count, metrics.evictions.inc
    )
    metrics.cache_bytes.set_function(lambda: cache.byte_count)
    metrics.cache_entries.set_function(lambda: len(cache))
    return cache


@asynccontextmanager
async def running(
    settings: EncoderSettings,
    *,
    tower: Tower | None = None,
    registry: CollectorRegistry | None = None,
) -> AsyncIterator[Running]:
    """The service inside the caller's process, ready; it stops at once when left.

    `tower` stands in for the checkpoint's own. Raises CheckpointError, MtlsFileError, or OSError
    for a used port.
    """
    registry = registry or telemetry.new_registry()
    async with AsyncExitStack() as stack:
        certificates = certificates_of(settings.mtls_files)
        await stack.enter_async_context(followed(certificates, registry))
        service = EncoderService(settings, registry, certificates)
        metrics_port = stack.enter_context(
            telemetry.served_metrics(registry, settings.host, settings.metrics_port)
        )
        probes = health_port(service.health, settings.host, settings.health_port)
        probe_port = await stack.enter_async_context(probes)
        await service.server.start()
        stack.push_async_callback(service.server.abort)
        if tower is None:
            tower = await asyncio.to_thread(load, settings)
        kind = await asyncio.to_thread(family, settings.model)
        batcher = await stack.enter_async_context(service.opened(tower, kind))
        server = service.server
        yield Running(server.port, metrics_port, probe_port, server, registry, batcher.broken)


def load(settings: EncoderSettings) -> VisionHalf:
    """The vision half of the checkpoint. Raises CheckpointError."""
    torch.set_num_threads(settings.torch_threads)
    return VisionHalf.load(
        settings.model,
        model_id=settings.served_name,
        dtype=torch_tensors.dtype_of(settings.dtype),
        device=settings.device,
        background=settings.image_background,
    )


def family(directory: Path) -> str:
    """The model family of a checkpoint, as its config states it."""
    return open_checkpoint(directory).model_type


async def run(settings: EncoderSettings) -> int:
    """Serves until a signal; returns the exit code. Raises CheckpointError."""
    telemetry.logger().info("settings", **_printable(settings))
    try:
        async with running(settings) as service:
            _announce(service)
            return await serve(service.server, service.broken)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _announce(service: Running) -> None:
    """One line on standard output, for whoever started the process."""
    line = {
        "event": "ready",
        "service": "encoder",
        "port": service.port,
        "metrics_port": service.metrics_port,
        "health_port": service.health_port,
    }
    print(json.dumps(line), flush=True)


def _printable(settings: EncoderSettings) -> dict[str, object]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in shown(settings).items()
    }


async def _prove(batcher: Batcher) -> None:
    """One picture through every stage, which also weighs a picture for the queue's bounds."""
    file = io.BytesIO()
    # Within the least limits that the settings allow, and long: transformers' Mistral 3 cannot
    # encode a picture of a single cell.
    PIL.Image.new("RGB", (64, 4), (128, 128, 128)).save(file, "PNG")
    interest = Interest()
    interest.join(None)
    data = memoryview(file.getvalue())
    try:
        size = await batcher.measure(data, DEFAULT_OPTIONS)
        await batcher.submit(data, DEFAULT_OPTIONS, size, "start", interest).result
    except ChiasmError as error:
        raise CheckpointError(
            f"the vision tower cannot encode a picture: {error.message}"
        ) from error
