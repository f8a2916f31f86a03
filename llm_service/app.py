"""Starts, proves, serves and stops the LLM service."""

import asyncio
import copy
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from prometheus_client import CollectorRegistry

from chiasm import settings as settings_reader
from chiasm import telemetry, torch_tensors
from chiasm.embedding_cache import EmbeddingCache
from chiasm.errors import ChiasmError
from chiasm.models.checkpoint import CheckpointError
from chiasm.models.language import GenerationDefaults, LanguageHalf
from chiasm.models.vision import VisionHalf
from chiasm.rpc import mtls
from chiasm.rpc.callers import ServerTls
from chiasm.rpc.certificates import Certificates, certificates_of, followed
from chiasm.rpc.health import Health, health_port
from chiasm.rpc.secure_channel import ClientTls
from chiasm.rpc.server import Server, serve
from chiasm.v1.llm_service_pb2 import SamplingParameters
from llm_service.constraint.compiler import Compiler
from llm_service.constraint.matcher import Vocabulary
from llm_service.embeddings import Rows
from llm_service.engine.engine import EmbeddedEngine, Engine
from llm_service.engine.values import (
    DecoderParts,
    Event,
    Failed,
    Finished,
    Prompt,
    SamplingParams,
    TokenDecoder,
)
from llm_service.holding.holding import Stores
from llm_service.holding.memory import MemoryStore
from llm_service.holding.metrics import HoldingMetrics
from llm_service.holding.shared import SharedStore
from llm_service.metrics import EngineCollector, LlmMetrics
from llm_service.pictures import PictureReader
from llm_service.references import References
from llm_service.request import read_sampling
from llm_service.servicer import SERVICE, LlmServicer
from llm_service.settings import LlmSettings
from llm_service.vision.cached import CachedSource
from llm_service.vision.discovery import discovery
from llm_service.vision.fallback import WithFallback
from llm_service.vision.fleet_metrics import FleetMetrics
from llm_service.vision.local import LocalTower
from llm_service.vision.pool import EncoderPool
from llm_service.vision.source import NoVision, VisionSource

_PROOF_SECONDS = 60.0
_WATCHED_PER_LIMIT = 4


@dataclass(frozen=True)
class Running:
    """A service that is ready to answer."""

    server: Server
    servicer: LlmServicer
    engine: Engine
    # Set when the model is broken for good: the process must end.
    broken: asyncio.Event
    metrics_port: int | None
    health_port: int | None

    @property
    def port(self) -> int:
        return self.server.port


async def run(settings: LlmSettings) -> int:
    """Serves until a signal; returns the process's exit code.

    Raises CheckpointError for a directory that cannot be served, MtlsFileError, and OSError for a
    taken port.
    """
    telemetry.logger().info("settings", **settings_reader.shown(settings))
    async with running(settings) as service:
        ready = {"event": "ready", "service": "llm", "port": service.port}
        more = {"metrics_port": service.metrics_port, "health_port": service.health_port}
        print(json.dumps(ready | more), flush=True)
        return await serve(service.server, service.broken)


@asynccontextmanager
async def running(settings: LlmSettings) -> AsyncIterator[Running]:
    """A service in this process: loaded, proved by one real answer, listening and SERVING."""
    registry = telemetry.new_registry()
    health = Health(SERVICE)
    certificates = certificates_of(settings.mtls_files)
    # Probes and scrapes are answered while the model is loaded, which no call is.
    with telemetry.served_metrics(registry, settings.host, settings.metrics_port) as metrics_port:
        async with (
            followed(certificates, registry),
            health_port(health, settings.host, settings.health_port) as probe_port,
            _loaded(settings, registry, health, certificates) as parts,
        ):
            server, servicer, engine, broken = parts
            yield Running(server, servicer, engine, broken, metrics_port, probe_port)


@asynccontextmanager
async def _loaded(
    settings: LlmSettings,
    registry: CollectorRegistry,
    health: Health,
    certificates: Certificates | None,
) -> AsyncIterator[tuple[Server, LlmServicer, Engine, asyncio.Event]]:
    torch.set_num_threads(settings.torch_threads)
    model = await asyncio.to_thread(_load_language, settings)
    async with _workers(settings) as workers, _engine(settings, model, registry) as run:
        engine, broken = run
        metrics = LlmMetrics(registry)
        telemetry.ServedModel(registry).tell(settings.served_name)
        vision = await _open_vision(settings, model, workers, metrics, registry, certificates)
        holding = _open_holding(settings, model, workers, registry)
        vocabulary = await asyncio.to_thread(_vocabulary, model)
        constraints = Compiler(vocabulary, settings.constraints)
        try:
            references = References(holding, workers)
            pictures = PictureReader(
                model.contract,
                settings.image_limits,
                settings.max_request_pixels,
                vision,
                references,
                workers,
            )
            servicer = LlmServicer(
                settings,
                model,
                engine,
                pictures,
                references,
                constraints,
                workers,
                metrics,
                lambda: server.draining,
            )
            server = Server(
                settings.server,
                servicer.service(),
                registry,
                health=health,
                tls=_server_tls(settings, certificates),
            )
            await server.start()
            await asyncio.to_thread(_prove, engine, model)
            await server.ready()
            yield server, servicer, engine, broken
            await server.abort()
        finally:
            await constraints.close()
            await holding.close()
            await vision.close()


def _load_language(settings: LlmSettings) -> LanguageHalf:
    encoder_dtype = settings.encoder_dtype or settings.dtype
    model = LanguageHalf.load(
        settings.model,
        model_id=settings.served_name,
        dtype=torch_tensors.dtype_of(settings.dtype),
        device=settings.device,
        encoder_dtype=torch_tensors.dtype_of(encoder_dtype),
        background=settings.image_background,
    )
    check_defaults(model.generation, settings.model)
    return model


def check_defaults(generation: GenerationDefaults, directory: Path) -> None:
    """Raises CheckpointError for defaults with which no request could be answered."""
    try:
        read_sampling(SamplingParameters(), generation)
    except ChiasmError as error:
        raise CheckpointError(
            f"{directory}/generation_config.json: {error.message} Correct it or take it out."
        ) from error
    except TypeError as error:
        raise CheckpointError(
            f"{directory}/generation_config.json holds a sampling value that is no number"
        ) from error


def _vocabulary(model: LanguageHalf) -> Vocabulary | None:
    """None where the grammar library does not understand the tokenizer: no constraints then."""
    tokenizer: Any = model.tokenizer
    # The copy keeps what the tokenizer itself is set to.
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    token_count = max(tokenizer.get_vocab().values()) + 1
    try:
        return Vocabulary.of(backend.to_str(), token_count, model.vocab_size, model.eos_ids)
    except ValueError:
        telemetry.logger().warning("no constraints", detail="the tokenizer's kind is not known")
        return None


async def _open_vision(
    settings: LlmSettings,
    model: LanguageHalf,
    workers: Executor,
    metrics: LlmMetrics,
    registry: CollectorRegistry,
    certificates: Certificates | None,
) -> VisionSource:
    if settings.vision == "none":
        return NoVision()
    local: VisionSource | None = None
    if "local" in (settings.vision, settings.vision_fallback):
        half = await asyncio.to_thread(_load_vision, settings)
        local = LocalTower(half, settings.image_limits, workers, settings.max_local_images)
    source = local
    if settings.vision != "local":
        source = _fleet(settings, model, local, registry, _encoder_tls(settings, certificates))
    assert source is not None
    entries: EmbeddingCache[Rows] = EmbeddingCache(
        settings.embedding_cache_bytes, lambda rows: rows.byte_count, metrics.cache_evictions.inc
    )
    metrics.cache_bytes.set_function(lambda: entries.byte_count)
    return CachedSource(source, model.contract.expected_identity, entries, workers)


def _fleet(
    settings: LlmSettings,
    model: LanguageHalf,
    local: VisionSource | None,
    registry: CollectorRegistry,
    tls: ClientTls | None,
) -> VisionSource:
    metrics = FleetMetrics(registry)
    found = discovery(settings.encoder_targets)
    fleet = EncoderPool(found, model.contract, settings.pool, metrics, tls)
    return fleet if local is None else WithFallback(fleet, local, metrics)


def _server_tls(settings: LlmSettings, certificates: Certificates | None) -> ServerTls | None:
    if certificates is None:
        return None
    return ServerTls(certificates.latest, mtls.callers(settings.mtls_clients))


def _encoder_tls(settings: LlmSettings, certificates: Certificates | None) -> ClientTls | None:
    if certificates is None:
        return None
    return ClientTls(certificates.latest, mtls.server_names(settings.mtls_encoders))


def _open_holding(
    settings: LlmSettings, model: LanguageHalf, workers: Executor, registry: CollectorRegistry
) -> Stores:
    metrics = HoldingMetrics(registry)
    memory = MemoryStore(settings.reference_seconds, settings.reference_bytes, metrics.dropped)
    metrics.watch(lambda: memory.byte_count)
    where = settings.shared_references
    shared = None
    if where is not None:
        shared = SharedStore(where, model.contract, workers, metrics.store_failed)
    return Stores(memory, shared, metrics.found)


def _load_vision(settings: LlmSettings) -> VisionHalf:
    return VisionHalf.load(
        settings.model,
        model_id=settings.served_name,
        dtype=torch_tensors.dtype_of(settings.encoder_dtype or settings.dtype),
        device=settings.device,
        background=settings.image_background,
    )


@asynccontextmanager
async def _workers(settings: LlmSettings) -> AsyncIterator[Executor]:
    workers = ThreadPoolExecutor(settings.decode_workers, "worker")
    try:
        yield workers
    finally:
        workers.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def _engine(
    settings: LlmSettings, model: LanguageHalf, registry: CollectorRegistry
) -> AsyncIterator[tuple[EmbeddedEngine, asyncio.Event]]:
    loop, broken = asyncio.get_running_loop(), asyncio.Event()
    # Beside the event loop: it proves the native layers and measures steps, for seconds.
    engine = await asyncio.to_thread(
        EmbeddedEngine,
        decoder_parts(settings, model),
        cast(TokenDecoder, model.tokenizer),
        settings.engine,
        on_fatal=lambda: _tell(loop, broken),
    )
    registry.register(EngineCollector(engine.stats))
    engine.start()
    watching = loop.create_task(_watch(engine, settings.step_limit_seconds))
    try:
        yield engine, broken
    finally:
        watching.cancel()
        engine.stop()


async def _watch(engine: EmbeddedEngine, limit: float) -> None:
    """Gives the engine up once a step takes longer than `limit` seconds: it hangs."""
    while engine.step_seconds <= limit:  # noqa: ASYNC110 - a thread that hangs sets no event
        await asyncio.sleep(limit / _WATCHED_PER_LIMIT)
    telemetry.logger().error("a step does not end; the engine is given up", seconds=limit)
    engine.abandon()


def _tell(loop: asyncio.AbstractEventLoop, broken: asyncio.Event) -> None:
    loop.call_soon_threadsafe(broken.set)


def decoder_parts(settings: LlmSettings, model: LanguageHalf) -> DecoderParts:
    """The language half as the engine takes it."""
    return DecoderParts(
        model=model.decoder,
        embed_tokens=model.embed_tokens,
        lm_head=model.lm_head,
        layer_count=model.layer_count,
        kv_head_count=model.kv_head_count,
        head_dim=model.head_dim,
        eos_ids=model.eos_ids,
        context_length=model.context_length,
        dtype=torch_tensors.dtype_of(settings.dtype),
        device=settings.device,
        position_axes=1 if model.positions_kind == "flat" else 3,
        level_count=model.contract.level_count,
        stateful=model.model if model.layers == "stateful" else None,
    )


def _prove(engine: Engine, model: LanguageHalf) -> None:
    """Generates two tokens for real: a service is ready when it has answered."""
    ended = threading.Event()
    failed: list[Failed] = []

    def publish(event: Event) -> None:
        if isinstance(event, Failed):
            failed.append(event)
        if isinstance(event, Finished | Failed):
            ended.set()

    prompt = Prompt((model.eos_ids[0], model.eos_ids[0]))
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.submit("start", prompt, sampling, None, publish)
    if not ended.wait(_PROOF_SECONDS):
        raise TimeoutError("the engine did not answer its first prompt")
    if failed:
        raise RuntimeError("the engine failed on its first prompt; the log says why")
