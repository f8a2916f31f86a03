"""The settings of traces, the same for all processes. Pure but for a look for packages."""

import importlib.util
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

ENDPOINT: Final = (
    "Collector of OpenTelemetry that spans are sent to (OTLP over gRPC), as http://host:4317 or "
    "https://host:4317. Needs the package chiasm[tracing] (docs/tracing.md). Default: none."
)
RATIO: Final = (
    "With --trace-endpoint: share of the traces that begin here of which spans are sent, 0 to 1. "
    "A trace that a caller began is sent or not as the caller says."
)
_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")


@dataclass(frozen=True)
class TraceSettings:
    """Where spans go, and the share of the traces that begin here of which they do."""

    endpoint: str
    ratio: float

    @property
    def encrypted(self) -> bool:
        """Whether it is sent by TLS."""
        return urlsplit(self.endpoint).scheme == "https"


def _checked(endpoint: str | None) -> str | None:
    if endpoint is None:
        return None
    if not _is_endpoint(endpoint):
        raise ValueError("an endpoint is http://host:port or https://host:port, nothing after it")
    if not all(map(_is_installed, _PACKAGES)):
        raise ValueError("traces need OpenTelemetry: pip install 'chiasm[tracing]'")
    return endpoint


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        named = bool(url.hostname) and url.port is not None
    except ValueError:
        return False
    rest = (url.path, url.query, url.fragment)
    plain = rest in (("", "", ""), ("/", "", "")) and "@" not in url.netloc
    visible = text.isprintable() and " " not in text
    return url.scheme in ("http", "https") and named and plain and visible


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


TraceEndpoint = Annotated[str | None, AfterValidator(_checked)]
"""A setting that is the address of a collector, in a process that could send to it."""


def trace_settings(endpoint: str | None, ratio: float) -> TraceSettings | None:
    """None where no traces are wanted."""
    return None if endpoint is None else TraceSettings(endpoint, ratio)
