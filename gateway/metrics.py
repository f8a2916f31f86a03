"""What the gateway counts, for Prometheus."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chiasm import telemetry

_BODY_BUCKETS: Final = tuple(4**power for power in range(5, 15))  # 1 KiB to 256 MiB
_ROUTES: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/version",
        "/openapi.json",
        "/v1/image_embeddings",
        "/v1/embeddings",
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
    }
)


class GatewayMetrics:
    """Counts and times of requests, in one process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.model = telemetry.ServedModel(registry)
        self.requests = Counter(
            "chiasm_gateway_requests",
            "Requests ended, by route, HTTP status and reason of failure.",
            ["route", "status", "reason"],
            registry=registry,
        )
        self.seconds = Histogram(
            "chiasm_gateway_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            ["route"],
            buckets=telemetry.DURATION_BUCKETS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "chiasm_gateway_first_token_seconds",
            "Time from a request's arrival to the first text from the LLM service.",
            buckets=telemetry.DURATION_BUCKETS,
            registry=registry,
        )
        self.body_bytes = Histogram(
            "chiasm_gateway_body_bytes",
            "Bytes of request bodies.",
            buckets=_BODY_BUCKETS,
            registry=registry,
        )
        self.downloads = Counter(
            "chiasm_gateway_picture_downloads",
            "Pictures fetched by URL, by how that ended: ok, or the reason of failure.",
            ["outcome"],
            registry=registry,
        )
        self.active_downloads = Gauge(
            "chiasm_gateway_active_picture_downloads",
            "Pictures that are being fetched or wait for it.",
            registry=registry,
        )
        self.active = Gauge(
            "chiasm_gateway_active_requests", "Requests in hand.", registry=registry
        )
        self.held_bytes = Gauge(
            "chiasm_gateway_held_body_bytes",
            "Bytes of bodies that wait for the LLM service to accept them.",
            registry=registry,
        )


def route_of(path: str) -> str:
    """The label of a path: a small fixed set, whatever is asked for."""
    if path in _ROUTES:
        return path
    if path == "/" or path.startswith("/page/"):
        return "page"
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
