"""Logs (one line a request a process, JSON or console) and Prometheus metrics of every process."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from chiasm.tracing import names, spans
from chiasm.tracing.metrics import SpanCounts
from chiasm.tracing.spans import Span
from chiasm.tracing.w3c import NO_TRACE, Trace

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Seconds. One set for all durations, so that panels compare.
DURATION_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300,
)  # fmt: skip


def start_logging(service: str, log_format: LogFormat, level: LogLevel) -> None:
    """Sends this process's logs, and those of the libraries under it, to standard error."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _service_name(service),
    ]
    json_lines = log_format == "json"
    ending: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json_lines
        else [
            # Plain tracebacks: the rich ones print local variables, so prompts and pictures.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries are quieter than we are: their notes would break "one line a request".
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("chiasm").setLevel(number)


def logger() -> structlog.typing.FilteringBoundLogger:
    """The process's logger; bound context (request id) joins every line."""
    bound: structlog.typing.FilteringBoundLogger = structlog.get_logger("chiasm")
    return bound


@contextmanager
def request_context(
    request_id: str, caller: Trace = NO_TRACE, *, name: str = "request", begins: bool = True
) -> Iterator[Span]:
    """Puts the request id on every line logged inside, and the ids of its trace if it has one.

    Calls made inside carry the trace on.

    Args:
        caller: the trace that the caller is in.
        name: of the span that is current inside, in a process that sends spans.
        begins: whether a request without a trace begins one there.
    """
    with spans.request(name, caller, {names.REQUEST_ID: request_id}, begins=begins) as span:
        ids = {"request_id": request_id}
        if trace_id := spans.current_trace().id:
            ids["trace_id"] = trace_id
        if span.recording:
            ids["span_id"] = span.id
        with structlog.contextvars.bound_contextvars(**ids):
            yield span


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures; one a process, passed to what counts."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    if (tracer := spans.tracer()) is not None:
        registry.register(SpanCounts(tracer.sent))
    return registry


class ServedModel:
    """Says which model a process serves, by one name and label in all of them, so that what they
    count can be joined."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "chiasm_model_info",
            "The model that is served, by the name that requests use; always 1.",
            ["model"],
            registry=registry,
        )

    def tell(self, model: str) -> None:
        """`model`, and no other any more."""
        self._gauge.clear()
        self._gauge.labels(model).set(1)


@contextmanager
def served_metrics(
    registry: CollectorRegistry, host: str, port: int | None
) -> Iterator[int | None]:
    """Serves `/metrics` on `port` while open (0 takes a free one, None serves nothing)."""
    if port is None:
        yield None
        return
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _service_name(service: str) -> structlog.typing.Processor:
    def add(
        _: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return add
