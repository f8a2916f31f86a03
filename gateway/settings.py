"""Settings of the gateway, from flags and `CHIASM_GATEWAY_*` variables."""

from dataclasses import dataclass

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from chiasm.settings import Settings
from chiasm.telemetry import LogFormat, LogLevel


@dataclass(frozen=True)
class PictureLimits:
    """Bounds on the pictures of one request; sizes in bytes after base64."""

    max_images: int
    max_image_bytes: int
    max_embedding_bytes: int


class GatewaySettings(Settings):
    """Serves OpenAI's HTTP interface in front of an LLM service."""

    model_config = SettingsConfigDict(env_prefix="CHIASM_GATEWAY_")

    llm: str = Field(
        "127.0.0.1:50051",
        min_length=1,
        description="LLM service: host:port; dns:///name:port to reach every address of a name; "
        "ipv4:address:port,address:port for several that are listed.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_body_bytes: int = Field(64 << 20, ge=1024, description="Largest request body, in bytes.")
    max_held_body_bytes: int = Field(
        1 << 30,
        ge=1024,
        description="Bytes of all bodies that wait for the LLM service to accept them; beyond it "
        "requests are turned away with 429.",
    )
    max_active_requests: int = Field(
        1024, ge=1, description="Requests in hand at once; beyond it they get 429."
    )
    max_images: int = Field(
        16, ge=0, description="Most pictures in a conversation, embeddings included."
    )
    max_image_bytes: int = Field(20 << 20, ge=1, description="Largest picture file, in bytes.")
    max_embedding_bytes: int = Field(
        48 << 20, ge=1, description="Largest embedding as an array, in bytes."
    )
    request_timeout_seconds: float = Field(
        600, gt=0, description="Longest that an answer may take; sent on as the deadline."
    )
    drain_seconds: float = Field(
        2, ge=0, description="Seconds of serving on after SIGTERM, so that callers notice."
    )
    grace_seconds: float = Field(
        600, ge=0, description="Seconds that running answers then have to end."
    )
    log_format: LogFormat = Field("console", description="console or json.")
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")

    @property
    def pictures(self) -> PictureLimits:
        return PictureLimits(self.max_images, self.max_image_bytes, self.max_embedding_bytes)
