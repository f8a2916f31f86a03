"""Settings of the gateway, from flags and `CHIASM_GATEWAY_*` variables."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field, FilePath, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from chiasm.rpc import mtls
from chiasm.settings import Settings
from chiasm.telemetry import LogFormat, LogLevel
from chiasm.tracing import settings as traces
from gateway.fetch.policy import UrlPolicy, listing, ports

if TYPE_CHECKING:
    from gateway.fetch.download import DownloadLimits

_ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")


@dataclass(frozen=True)
class PictureLimits:
    """Bounds on the pictures of one request; sizes in bytes after base64."""

    max_images: int
    max_image_bytes: int
    max_embedding_bytes: int
    max_request_image_bytes: int = 64 << 20


def origins(text: str) -> tuple[str, ...]:
    """The origins of a list, as browsers write them. Raises ValueError."""
    listed = tuple(filter(None, (one.strip() for one in text.split(","))))
    for one in listed:
        if one != "*" and not _ORIGIN.fullmatch(one):
            text = "an origin is https://name or http://name:port, lower case, nothing after it"
            raise ValueError(text)
    return listed


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
    max_request_image_bytes: int = Field(
        64 << 20, ge=1, description="Bytes of all picture files of a request."
    )
    max_embedding_bytes: int = Field(
        48 << 20, ge=1, description="Largest embedding as an array, in bytes."
    )
    url_pictures: bool = Field(True, description="Fetch pictures that are named by http(s) URLs.")
    url_allow: str = Field(
        "",
        description="Where pictures are fetched from although it is not public, separated by "
        "commas: names (whatever their addresses), .name for all below it, addresses, networks.",
    )
    url_deny: str = Field(
        "", description="Where pictures are never fetched from, in the form of --url-allow."
    )
    url_allowed_only: bool = Field(
        False, description="Fetch pictures from nowhere but what --url-allow lists."
    )
    url_ports: str = Field("80,443", description="Ports of URLs that pictures are fetched from.")
    url_seconds: float = Field(
        10, gt=0, description="Longest that a picture may take to be fetched, waiting included."
    )
    url_redirects: int = Field(5, ge=0, description="Most redirects that are followed.")
    url_downloads: int = Field(
        64, ge=1, description="Pictures that are fetched at once; others wait, then get 429."
    )
    url_downloads_of_a_host: int = Field(
        16, ge=1, description="Pictures that are fetched from one host at once."
    )
    url_ca_file: FilePath | None = Field(
        None,
        description="Certificates (PEM) that servers of pictures are checked with. Default: "
        "the system's.",
    )
    body_timeout_seconds: float = Field(
        120,
        gt=0,
        description="Seconds from the start of a request in which its whole body must arrive.",
    )
    header_timeout_seconds: float = Field(
        30,
        gt=0,
        description="Seconds from the first byte of a request in which its headers must arrive.",
    )
    idle_timeout_seconds: int = Field(
        90,
        ge=1,
        description="Seconds after which a connection without a request, or whose answer nobody "
        "reads, is closed. Choose more than the clients' pools, and the proxies, keep theirs.",
    )
    max_header_bytes: int = Field(
        64 << 10,
        ge=1024,
        description="Bytes of a request's line and headers together; beyond it 431.",
    )
    max_headers: int = Field(128, ge=8, description="Headers of a request; beyond it 431.")
    max_json_depth: int = Field(
        128, ge=8, le=200, description="Deepest nesting of a JSON body; beyond it 400."
    )
    max_connections: int = Field(
        4096, ge=1, description="Connections at once; beyond it they get 503 and are closed."
    )
    keys_file: Path | None = Field(
        None,
        description="API keys (TOML; see docs/gateway-keys.md), read again when it changes. With "
        "it every path but /health and /ready needs a key; without it the gateway is open.",
    )
    open_metrics: bool = Field(
        False, description="Answer /metrics without a key although there is a --keys-file."
    )
    open_page: bool = Field(
        False,
        description="Send the page at / (which asks for a key) without a key although there is a "
        "--keys-file.",
    )
    tls_cert: Path | None = Field(
        None,
        description="Certificate with its chain (PEM): serve HTTPS, TLS 1.2 at least. Read again "
        "when it changes. Goes with --tls-key.",
    )
    tls_key: Path | None = Field(
        None, description="Key of --tls-cert (PEM, not encrypted). Read again when it changes."
    )
    mtls_cert: Path | None = Field(None, description=mtls.CERT)
    mtls_key: Path | None = Field(None, description=mtls.KEY)
    mtls_ca: Path | None = Field(None, description=mtls.CA)
    mtls_llm: str = Field("", description=mtls.servers("of the LLM service"))
    cors_origins: str = Field(
        "",
        description="Origins whose pages may call the gateway from a browser, separated by commas, "
        "each as https://name or with its port; * for all. Default: none.",
    )
    request_timeout_seconds: float = Field(
        600, gt=0, description="Longest that an answer may take; sent on as the deadline."
    )
    keep_alive_seconds: float = Field(
        5,
        gt=0,
        description="A stream without news sends a comment after this long, or twice this at most, "
        "so that no proxy takes it for dead.",
    )
    drain_seconds: float = Field(
        2, ge=0, description="Seconds of serving on after SIGTERM, so that callers notice."
    )
    grace_seconds: float = Field(
        600, ge=0, description="Seconds that running answers then have to end."
    )
    page: bool = Field(True, description="Serve the page to try it at /.")
    log_format: LogFormat = Field("console", description="console or json.")
    log_level: LogLevel = Field("info", description="debug, info, warning or error.")
    trace_endpoint: traces.TraceEndpoint = Field(None, description=traces.ENDPOINT)
    trace_ratio: float = Field(1, ge=0, le=1, description=traces.RATIO)

    @property
    def tracing(self) -> traces.TraceSettings | None:
        return traces.trace_settings(self.trace_endpoint, self.trace_ratio)

    @property
    def origins(self) -> tuple[str, ...]:
        return origins(self.cors_origins)

    @property
    def open_paths(self) -> frozenset[str]:
        """Paths that need no key, beside those that never do; one that ends in / with all below."""
        metrics = ("/metrics",) if self.open_metrics else ()
        page = ("/", "/page/") if self.open_page else ()
        return frozenset((*metrics, *page))

    @property
    def pictures(self) -> PictureLimits:
        return PictureLimits(
            self.max_images,
            self.max_image_bytes,
            self.max_embedding_bytes,
            self.max_request_image_bytes,
        )

    @property
    def url_policy(self) -> UrlPolicy:
        return UrlPolicy(
            listing(self.url_allow),
            listing(self.url_deny),
            self.url_allowed_only,
            ports(self.url_ports),
        )

    @property
    def downloads(self) -> "DownloadLimits":
        # Loads the HTTP client, which takes longer than to read settings.
        from gateway.fetch.download import DownloadLimits

        return DownloadLimits(
            seconds=self.url_seconds,
            max_bytes=self.max_image_bytes,
            redirects=self.url_redirects,
            at_once=self.url_downloads,
            at_once_of_a_host=self.url_downloads_of_a_host,
        )

    @field_validator("url_allow", "url_deny")
    @classmethod
    def _are_places(cls, text: str) -> str:
        listing(text)
        return text

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        origins(text)
        return text

    @model_validator(mode="after")
    def _is_a_pair(self) -> "GatewaySettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together; give both or none")
        return self

    @field_validator("mtls_llm")
    @classmethod
    def _are_servers(cls, text: str) -> str:
        mtls.server_names(text)
        return text

    @model_validator(mode="after")
    def _agree_on_mtls(self) -> "GatewaySettings":
        mtls.check(self.mtls_files, "--mtls-llm", self.mtls_llm)
        return self

    @property
    def mtls_files(self) -> mtls.Files | None:
        return mtls.files(self.mtls_cert, self.mtls_key, self.mtls_ca)

    @field_validator("url_ports")
    @classmethod
    def _are_ports(cls, text: str) -> str:
        ports(text)
        return text
