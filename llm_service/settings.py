"""Settings of the LLM service, from flags and `CHIASM_LLM_*` variables."""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from chiasm import colours
from chiasm.images import DEFAULT_LIMITS, ImageLimits
from chiasm.rpc import mtls
from chiasm.rpc.server import ServerSettings
from chiasm.settings import Colour, Settings
from chiasm.telemetry import LogFormat, LogLevel
from chiasm.tracing import settings as traces
from llm_service.vision.discovery import FORMS, check_target

if TYPE_CHECKING:
    from llm_service.constraint.limits import ConstraintLimits
    from llm_service.engine.values import EngineSettings
    from llm_service.holding.shared import SharedSettings
    from llm_service.vision.pool import PoolSettings

Vision = Literal["none", "local", "remote"]
Fallback = Literal["none", "local"]
DTypeName = Literal["float32", "bfloat16", "float16"]
_STORE_SCHEMES = ("redis://", "rediss://", "unix://")
# Of a file with the store's URL, at most.
_STORE_CHARACTERS = 4096


class LlmSettings(Settings):
    """Serves the language half of a checkpoint over gRPC (chiasm.v1.LlmService)."""

    model_config = SettingsConfigDict(env_prefix="CHIASM_LLM_")

    model: Path = Field(description="Directory of the checkpoint.")
    model_id: str = Field(
        "", description="Name under which the model is served. Default: the directory's name."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
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
    mtls_encoders: str = Field("", description=mtls.servers("of encoders"))
    vision: Vision = Field(
        "remote", description="Where raw pictures are encoded: none, local or remote."
    )
    encoders: str = Field(
        "127.0.0.1:50061",
        description="Encoder services for --vision remote, separated by commas: host:port; "
        "dns:///name:port for every address of a name, looked up again and again; file:///path for "
        "a file with one host:port a line, read again when it changes.",
    )
    encoder_attempts: int = Field(
        3, ge=1, le=16, description="Most encoders that are asked for one picture."
    )
    encoder_attempt_seconds: float = Field(
        120, gt=0, description="Longest that one encoder may take for one picture."
    )
    encoder_silence_seconds: float = Field(
        6, gt=0, description="An encoder that answers no probe for so long is given up."
    )
    encoder_wait_seconds: float = Field(
        1,
        ge=0,
        description="For how long pictures wait for an encoder after the last one was lost; then "
        "they fail at once.",
    )
    encoder_hedge: bool = Field(
        False,
        description="Ask a second encoder for a picture whose answer is later than 95 of 100 are.",
    )
    vision_fallback: Fallback = Field(
        "none",
        description="With --vision remote, who encodes when no encoder answers: none, or local: a "
        "tower in this process, loaded at start.",
    )
    max_local_images: int = Field(
        256, ge=1, description="Most pictures in work in a local tower; beyond it QUEUE_FULL."
    )
    dtype: DTypeName = Field("float32", description="Type in which the decoder computes.")
    encoder_dtype: DTypeName | None = Field(
        None, description="Type in which the encoders compute. Default: the decoder's."
    )
    device: str = Field("cpu", description="Torch device of the decoder.")
    torch_threads: int = Field(
        max(1, (os.cpu_count() or 1) // 2),
        ge=1,
        description="Threads of a matrix product. Default: half of the cores.",
    )
    decode_workers: int = Field(
        2, ge=1, description="Threads that read headers, hash and decode pictures."
    )
    kv_bytes: int = Field(512 << 20, ge=1 << 16, description="Bytes for keys and values.")
    step_token_budget: int = Field(
        512, ge=1, description="Most tokens a step computes; bounds how long a stream waits."
    )
    decode_stretch: float = Field(
        1.5,
        ge=0,
        description="How many times as long as at its beginning an answer may wait for a token "
        "because new prompts are computed beside it, above 1. Higher: pictures are answered "
        "sooner, streams slow down more. 0: no limit but --step-token-budget.",
    )
    max_running: int = Field(64, ge=1, description="Most sequences in one step.")
    prefix_cache: bool = Field(
        True, description="Keep keys and values for prompts that begin alike, for each tenant."
    )
    max_active_requests: int = Field(
        256, ge=1, description="Answers admitted at once, each choice one; beyond it QUEUE_FULL."
    )
    max_images: int = Field(
        16, ge=0, description="Most pictures in a conversation, of all kinds together."
    )
    max_image_bytes: int = Field(
        DEFAULT_LIMITS.max_bytes, ge=1, description="Largest picture file, in bytes."
    )
    max_image_pixels: int = Field(
        DEFAULT_LIMITS.max_pixels, ge=1, description="Largest picture, in pixels."
    )
    max_request_pixels: int = Field(
        4 * DEFAULT_LIMITS.max_pixels, ge=1, description="Pixels of all pictures of a request."
    )
    image_background: Colour = Field(
        colours.WHITE,
        description="What shows through transparent pixels: white, black or #rrggbb; part of the "
        "encoder's identity, so the same for the encoders.",
    )
    embedding_cache_bytes: int = Field(
        256 << 20, ge=0, description="Bytes of embeddings that are kept; 0 keeps none."
    )
    reference_seconds: float = Field(
        3600, gt=0, description="Seconds for which embeddings are held under a reference."
    )
    reference_bytes: int = Field(
        1 << 30,
        ge=0,
        description="Bytes of embeddings that this process holds for references; the oldest leave "
        "first.",
    )
    reference_store: SecretStr | None = Field(
        None,
        description="Redis or Valkey in which several LLM services share what they hold, as "
        "redis://[user:password@]host:port[/number]. Needs the package chiasm[redis]. Default: "
        "none.",
    )
    reference_store_file: Path | None = Field(
        None,
        description="File that holds what --reference-store would say, and nothing else: a "
        "password in it is in no command line and no environment. Read at start.",
    )
    reference_store_timeout_seconds: float = Field(
        1, gt=0, description="Longest wait for the store; then the service goes on without it."
    )
    max_constraint_bytes: int = Field(
        64 << 10, ge=1, description="Largest schema, grammar or regular expression, in bytes."
    )
    constraint_seconds: float = Field(
        3, gt=0, description="Longest that a constraint may take to compile."
    )
    template_variables: str = Field(
        "enable_thinking",
        description="Variables of the chat template that requests may set, separated by commas.",
    )
    request_timeout_seconds: float = Field(
        600,
        gt=0,
        description="Longest that a request may take; a caller's deadline may be shorter.",
    )
    step_limit_seconds: float = Field(
        300,
        gt=0,
        description="Longest that one step of the engine may take; then it counts as hung, all "
        "requests fail and the service exits with 1.",
    )
    drain_seconds: float = Field(
        2, ge=0, description="Seconds of serving on after SIGTERM, so that callers notice."
    )
    grace_seconds: float = Field(
        600, ge=0, description="Seconds that running streams then have to end."
    )
    connection_age_seconds: float = Field(
        60, gt=0, description="Age at which a connection is renewed, so that replicas share."
    )
    log_format: LogFormat = Field("console", description="console or json.")
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")
    trace_endpoint: traces.TraceEndpoint = Field(None, description=traces.ENDPOINT)
    trace_ratio: float = Field(1, ge=0, le=1, description=traces.RATIO)

    @field_validator("encoders")
    @classmethod
    def _are_targets(cls, encoders: str) -> str:
        for target in _parts(encoders):
            check_target(target)
        return encoders

    @field_validator("mtls_clients")
    @classmethod
    def _are_callers(cls, text: str) -> str:
        mtls.callers(text)
        return text

    @field_validator("mtls_encoders")
    @classmethod
    def _are_servers(cls, text: str) -> str:
        mtls.server_names(text)
        return text

    @model_validator(mode="after")
    def _agree_on_mtls(self) -> "LlmSettings":
        remote = self.vision == "remote"
        mtls.check(self.mtls_files, "--mtls-clients", self.mtls_clients)
        mtls.check(self.mtls_files, "--mtls-encoders", self.mtls_encoders, needed=remote)
        return self

    @model_validator(mode="after")
    def _agree(self) -> "LlmSettings":
        if self.step_token_budget < self.max_running:
            raise ValueError("step_token_budget must be at least max_running")
        if 0 < self.decode_stretch <= 1:
            raise ValueError("decode_stretch must be above 1, or 0 for no limit")
        if self.vision == "remote" and not self.encoder_targets:
            raise ValueError(f"vision is remote, so encoders must name at least one {FORMS}")
        _check_store(self)
        return self

    @property
    def tracing(self) -> traces.TraceSettings | None:
        return traces.trace_settings(self.trace_endpoint, self.trace_ratio)

    @property
    def served_name(self) -> str:
        return self.model_id or self.model.resolve().name

    @property
    def mtls_files(self) -> mtls.Files | None:
        return mtls.files(self.mtls_cert, self.mtls_key, self.mtls_ca)

    @property
    def encoder_targets(self) -> tuple[str, ...]:
        return _parts(self.encoders)

    @property
    def settable_variables(self) -> frozenset[str]:
        """Names that requests may set."""
        return frozenset(_parts(self.template_variables))

    @property
    def pool(self) -> "PoolSettings":
        # Loads torch.
        from llm_service.vision.encoder import EncoderSettings
        from llm_service.vision.pool import PoolSettings

        return PoolSettings(
            encoder=EncoderSettings(
                silence_seconds=self.encoder_silence_seconds,
                attempt_seconds=self.encoder_attempt_seconds,
            ),
            attempts=self.encoder_attempts,
            # With a tower of its own the service has better to do than to wait.
            wait_seconds=0 if self.vision_fallback == "local" else self.encoder_wait_seconds,
            hedge=self.encoder_hedge,
        )

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(
            max_bytes=self.max_image_bytes,
            max_pixels=self.max_image_pixels,
            background=colours.to_rgb(self.image_background),
        )

    @property
    def engine(self) -> "EngineSettings":
        # The engine loads torch, which takes seconds; reading settings must not.
        from llm_service.engine.values import EngineSettings

        return EngineSettings(
            kv_bytes=self.kv_bytes,
            step_token_budget=self.step_token_budget,
            decode_stretch=self.decode_stretch,
            max_running=self.max_running,
            max_waiting=self.max_active_requests,
            prefix_cache=self.prefix_cache,
        )

    @property
    def constraints(self) -> "ConstraintLimits":
        # Loads the grammar library.
        from llm_service.constraint.limits import ConstraintLimits

        return ConstraintLimits(
            text_bytes=self.max_constraint_bytes, compile_seconds=self.constraint_seconds
        )

    @property
    def shared_references(self) -> "SharedSettings | None":
        # Loads torch.
        from llm_service.holding.shared import SharedSettings

        url = _store_of(self)
        if url is None:
            return None
        return SharedSettings(
            url=url,
            seconds=self.reference_seconds,
            timeout=self.reference_store_timeout_seconds,
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


def _parts(listed: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in listed.split(",") if part.strip())


def _store_of(settings: LlmSettings) -> str | None:
    """The store's URL, of the flag or of its file. Raises ValueError, without its content."""
    given, path = settings.reference_store, settings.reference_store_file
    if path is None:
        return None if given is None else given.get_secret_value()
    if given is not None:
        raise ValueError("reference_store and reference_store_file: give one of the two")
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_STORE_CHARACTERS).strip()
    except (OSError, UnicodeError) as error:
        # Not from the error, whose text may have a part of the file's.
        raise ValueError(f"reference_store_file: {path}: {type(error).__name__}") from None


def _check_store(settings: LlmSettings) -> None:
    url = _store_of(settings)
    if url is None:
        return
    if not url.startswith(_STORE_SCHEMES):
        name = (
            "reference_store" if settings.reference_store_file is None else "reference_store_file"
        )
        raise ValueError(f"{name} begins with redis://, rediss:// or unix://")
    if importlib.util.find_spec("redis") is None:
        raise ValueError("reference_store needs the package redis: pip install 'chiasm[redis]'")
