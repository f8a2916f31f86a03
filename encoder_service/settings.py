"""Settings of the encoder service, from flags and `CHIASM_ENCODER_*` variables."""

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from chiasm import colours
from chiasm.images import DEFAULT_LIMITS, PILLOW_MAX_PIXELS, ImageLimits
from chiasm.models.identity import FeatureType
from chiasm.rpc import mtls
from chiasm.rpc.server import ServerSettings
from chiasm.settings import Colour, Settings
from chiasm.telemetry import LogFormat, LogLevel
from chiasm.tracing import settings as traces


@dataclass(frozen=True)
class BatcherSettings:
    """Threads, batches and the bounds of the queue (pictures, bytes of their files, patches)."""

    decode_workers: int
    bit_exact: bool
    # Of its own cost, that a picture may be passed for.
    stretch: float
    max_batch_patches: int
    max_images: int
    max_bytes: int
    max_patches: int


def _cores() -> int:
    """Cores that this process may use; a container's CPU set counts, its CPU quota does not."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EncoderSettings(Settings):
    """Serves the vision half of a checkpoint over gRPC (chiasm.v1.EncoderService)."""

    model_config = SettingsConfigDict(env_prefix="CHIASM_ENCODER_")

    model: Path = Field(description="Directory of the checkpoint.")
    model_id: str = Field(
        "",
        description="Name under which the model is served; part of the encoder's identity, so the "
        "same as the LLM service's. Default: the directory's name.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50061, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of /metrics; 0 takes a free one. Default: none."
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of gRPC's health service alone, in plaintext whatever else is on, for "
        "probes; 0 takes a free one. Default: none.",
    )
    mtls_cert: Path | None = Field(None, description=mtls.CERT)
    mtls_key: Path | None = Field(None, description=mtls.KEY)
    mtls_ca: Path | None = Field(None, description=mtls.CA)
    mtls_clients: str = Field("", description=mtls.CLIENTS)
    encoder_name: str = Field(
        "", max_length=256, description="Name of this instance in replies. Default: hostname:port."
    )
    dtype: FeatureType = Field("float32", description="Type in which the tower computes.")
    device: str = Field("cpu", description="Torch device of the tower.")
    torch_threads: int = Field(
        default_factory=_cores,
        ge=1,
        description="Threads of a matrix product. Default: all cores that the process may use; set "
        "fewer where other services share the machine.",
    )
    decode_workers: int = Field(
        default_factory=_cores,
        ge=1,
        description="Threads that decode and preprocess; each may hold 600 MB while it decodes a "
        "picture of the largest size. Default: the cores that the process may use.",
    )
    bit_exact: bool = Field(
        True,
        description="Give each picture a forward of its own, so that its features do not depend on "
        "its batch mates in any bit. Without it pictures share one forward: faster on a GPU.",
    )
    max_batch_patches: int = Field(
        8192, ge=1, description="Most patches that the tower takes at once (one picture always)."
    )
    queue_stretch: float = Field(
        16,
        ge=0,
        description="A picture is passed by cheaper ones that come up to so many times its own "
        "cost after it. 0: first come, first served.",
    )
    max_queue_images: int = Field(
        256, ge=1, description="Most pictures that wait; beyond it QUEUE_FULL."
    )
    max_queue_bytes: int = Field(
        512 << 20, ge=1, description="Most bytes of picture files that wait."
    )
    max_queue_patches: int = Field(
        262_144,
        ge=1,
        description="Most patches that wait; those of an undecoded picture are estimated.",
    )
    cache_bytes: int = Field(
        256 << 20, ge=0, description="Bytes of embeddings that are kept; 0 keeps none."
    )
    max_image_bytes: int = Field(
        DEFAULT_LIMITS.max_bytes, ge=1024, description="Largest picture file, in bytes."
    )
    max_image_pixels: int = Field(
        DEFAULT_LIMITS.max_pixels,
        ge=256,
        le=PILLOW_MAX_PIXELS,
        description="Largest picture, in pixels.",
    )
    image_background: Colour = Field(
        colours.WHITE,
        description="What shows through transparent pixels: white, black or #rrggbb; part of the "
        "encoder's identity, so the same for the LLM service.",
    )
    drain_seconds: float = Field(
        2, ge=0, description="Seconds of serving on after SIGTERM, so that callers notice."
    )
    grace_seconds: float = Field(
        60, ge=0, description="Seconds that running calls then have to end."
    )
    connection_age_seconds: float = Field(
        60, gt=0, description="Age at which a connection is renewed, so that replicas share."
    )
    log_format: LogFormat = Field("console", description="console or json.")
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")
    trace_endpoint: traces.TraceEndpoint = Field(None, description=traces.ENDPOINT)
    trace_ratio: float = Field(1, ge=0, le=1, description=traces.RATIO)

    @field_validator("mtls_clients")
    @classmethod
    def _are_callers(cls, text: str) -> str:
        mtls.callers(text)
        return text

    @model_validator(mode="after")
    def _agree_on_mtls(self) -> "EncoderSettings":
        mtls.check(self.mtls_files, "--mtls-clients", self.mtls_clients)
        return self

    @property
    def mtls_files(self) -> mtls.Files | None:
        return mtls.files(self.mtls_cert, self.mtls_key, self.mtls_ca)

    @property
    def tracing(self) -> traces.TraceSettings | None:
        return traces.trace_settings(self.trace_endpoint, self.trace_ratio)

    @property
    def served_name(self) -> str:
        return self.model_id or self.model.resolve().name

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
            background=colours.to_rgb(self.image_background),
        )

    @property
    def batcher(self) -> BatcherSettings:
        return BatcherSettings(
            decode_workers=self.decode_workers,
            bit_exact=self.bit_exact,
            stretch=self.queue_stretch,
            max_batch_patches=self.max_batch_patches,
            max_images=self.max_queue_images,
            max_bytes=self.max_queue_bytes,
            max_patches=self.max_queue_patches,
        )

    @property
    def server(self) -> ServerSettings:
        return ServerSettings(
            host=self.host,
            port=self.port,
            drain_seconds=self.drain_seconds,
            grace_seconds=self.grace_seconds,
            connection_age_seconds=self.connection_age_seconds,
        )
