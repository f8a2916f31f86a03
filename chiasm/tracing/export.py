"""Spans by OpenTelemetry: made here, gathered in a bounded queue, sent to a collector by a thread.

A request never waits for the collector. Spans that find the queue full, that the collector does not
take, or that are left when the process ends, are lost and counted.
"""

import logging
import threading
import time
import uuid
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Tracer as OtelTracer

import chiasm
from chiasm.tracing import names, spans
from chiasm.tracing.metrics import CAUSES, Cause, Sent
from chiasm.tracing.settings import TraceSettings
from chiasm.tracing.spans import NOTHING, Attributes, Kind, Span
from chiasm.tracing.w3c import Trace

# Spans of some hundred requests; 15 MB when they all wait.
_QUEUED: Final = 4096
# Spans of one export. They are encoded in one go, for 3 ms, in which nothing else of Python runs.
_BATCH: Final = 128
# Seconds until a span that comes alone is sent.
_LATEST: Final = 1.0
# Seconds that one export may take, tries again included.
_EXPORT_SECONDS: Final = 5.0
# Seconds for the last spans when the process ends, and then for a thread that hangs in a call.
_FLUSH_SECONDS: Final = 1.5
_LET_GO_SECONDS: Final = 0.3

_KINDS: Final[Mapping[Kind, SpanKind]] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_NONE: Final[Attributes] = {}


class Outbox(SpanProcessor):
    """Spans on their way to `exporter`, at most `most` of them; more are dropped and counted."""

    def __init__(self, exporter: SpanExporter, most: int = _QUEUED) -> None:
        self._exporter = exporter
        self._most = most
        self._queue: deque[ReadableSpan] = deque()
        # Spans are counted by this process's threads and by the one that sends.
        self._lock = threading.Lock()
        self._exported = 0
        self._dropped: Tally[Cause] = Tally()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Takes a span; never waits."""
        if self._stopping.is_set():
            self._drop("stopped", 1)
        elif len(self._queue) >= self._most:
            self._drop("queue_full", 1)
        else:
            self._queue.append(span)
            if len(self._queue) >= _BATCH and not self._wake.is_set():
                self._wake.set()

    def sent(self) -> Sent:
        """What became of the spans so far."""
        with self._lock:
            return Sent(self._exported, {cause: self._dropped[cause] for cause in CAUSES})

    def shutdown(self) -> None:
        """Sends what waits, for two seconds at most; what is left is dropped."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(_FLUSH_SECONDS)
        # Ends a call under way.
        self._exporter.shutdown()
        self._thread.join(_LET_GO_SECONDS)
        self._drop("stopped", len(self._queue))

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Whether nothing waits after that time."""
        deadline = time.monotonic() + timeout_millis / 1000
        self._wake.set()
        while self._queue and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._queue

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(_LATEST)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while batch := self._taken():
            try:
                done = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception:
                # The thread must go on: the next batch may do.
                logging.getLogger("chiasm").exception("spans cannot be sent")
                done = False
            if done:
                with self._lock:
                    self._exported += len(batch)
            else:
                self._drop("stopped" if self._stopping.is_set() else "export_failed", len(batch))
                if self._stopping.is_set():
                    return

    def _taken(self) -> list[ReadableSpan]:
        return [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]

    def _drop(self, cause: Cause, count: int) -> None:
        with self._lock:
            self._dropped[cause] += count


class _Recording:
    """A span that will be sent."""

    recording = True

    def __init__(self, tracer: OtelTracer, span: OtelSpan, ahead: int, state: str) -> None:
        self._tracer = tracer
        self._span = span
        # Nanoseconds from time.monotonic_ns() to the clock of the day, one for a whole request, so
        # that its spans fit together whatever that clock does meanwhile.
        self._ahead = ahead
        self._state = state

    @property
    def id(self) -> str:
        return f"{self._span.get_span_context().span_id:016x}"

    @property
    def trace(self) -> Trace:
        return _trace_of(self._span.get_span_context(), self._state)

    def put(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, reason: str, *, error: bool = True) -> None:
        self._span.set_attribute(names.ERROR_TYPE, str(reason))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, str(reason)))

    def child(self, name: str, kind: Kind, attributes: Attributes) -> Span:
        return self._child(name, kind, attributes, time.monotonic_ns() + self._ahead)

    def past(
        self,
        name: str,
        began: float,
        ended: float,
        attributes: Attributes = _NONE,
        event: tuple[str, float] | None = None,
    ) -> None:
        span = self._child(name, "internal", attributes, self._wall(began))._span
        if event is not None:
            span.add_event(event[0], timestamp=self._wall(event[1]))
        span.end(self._wall(ended))

    def end(self) -> None:
        self._span.end(time.monotonic_ns() + self._ahead)

    def _child(self, name: str, kind: Kind, attributes: Attributes, start: int) -> "_Recording":
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            kind=_KINDS[kind],
            attributes=attributes,
            start_time=start,
        )
        return _Recording(self._tracer, span, self._ahead, self._state)

    def _wall(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._ahead


class ExportingTracer:
    """Makes the spans of requests; whether a trace is sampled is its caller's word, or chance."""

    def __init__(self, provider: TracerProvider, outbox: Outbox) -> None:
        self._tracer = provider.get_tracer("chiasm", chiasm.__version__)
        self._outbox = outbox

    def sent(self) -> Sent:
        return self._outbox.sent()

    def begin(self, name: str, caller: Trace, attributes: Attributes) -> tuple[Span, Trace]:
        ahead = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(NonRecordingSpan(_context_of(caller))),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=time.monotonic_ns() + ahead,
        )
        found = span.get_span_context()
        if not found.is_valid:  # OTEL_SDK_DISABLED
            return NOTHING, caller
        trace = _trace_of(found, caller.state)
        if not span.is_recording():
            return NOTHING, trace
        return _Recording(self._tracer, span, ahead, caller.state), trace


def exporter(settings: TraceSettings) -> SpanExporter:
    """What sends spans to the collector. Raises whatever OpenTelemetry does for its variables."""
    return OTLPSpanExporter(
        endpoint=settings.endpoint, insecure=not settings.encrypted, timeout=_EXPORT_SECONDS
    )


def provider(settings: TraceSettings, service: str) -> TracerProvider:
    """What makes the spans of `service`. Raises whatever OpenTelemetry does for its variables."""
    return TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.ratio)),
        resource=Resource.create(_described(service)),
        shutdown_on_exit=False,
    )


@contextmanager
def exporting(made: TracerProvider, outbox: Outbox) -> Iterator[None]:
    """Spans go to the collector while open. Leaving takes two seconds at most."""
    # Its warnings are about single tries; its errors say, every 20 s, why spans are lost.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    made.add_span_processor(outbox)
    spans.trace_with(ExportingTracer(made, outbox))
    try:
        yield
    finally:
        spans.trace_with(None)
        outbox.shutdown()


def _described(service: str) -> dict[str, str]:
    return {
        names.SERVICE_NAME: f"chiasm-{service}",
        names.SERVICE_NAMESPACE: "chiasm",
        names.SERVICE_VERSION: chiasm.__version__,
        names.SERVICE_INSTANCE: str(uuid.uuid4()),
    }


def _context_of(trace: Trace) -> SpanContext:
    """The caller's span; an invalid one where there is no trace."""
    if not trace.parent:
        return SpanContext(0, 0, is_remote=True)
    _, trace_id, span_id, flags = trace.parent.split("-")[:4]
    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        # Of the flags none but `sampled` is ours to send on.
        trace_flags=TraceFlags(int(flags, 16) & TraceFlags.SAMPLED),
        trace_state=TraceState.from_header([trace.state]) if trace.state else None,
    )


def _trace_of(context: SpanContext, state: str) -> Trace:
    flags = int(context.trace_flags) & TraceFlags.SAMPLED
    return Trace(f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}", state)
