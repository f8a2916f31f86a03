"""A collector of OpenTelemetry on a real port: takes what processes export, over OTLP and gRPC."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Seen:
    """A span as it came, with the name of the service that sent it."""

    service: str
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return {one.key: _plain(one.value) for one in self.span.attributes}

    @property
    def failed(self) -> bool:
        return self.span.status.code == trace_pb2.Status.STATUS_CODE_ERROR


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What has been exported so far. `block` makes it answer nobody, as a hung one does."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self._open = threading.Event()
        self._open.set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.append(request)
        self._open.wait(_WAIT_SECONDS)
        return trace_service_pb2.ExportTraceServiceResponse()

    def block(self) -> None:
        self._open.clear()

    def unblock(self) -> None:
        self._open.set()

    def spans(self) -> list[Seen]:
        """All spans, in the order in which they came."""
        return [
            Seen(_service(group), span)
            for request in list(self.requests)
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def of_trace(self, trace: str, until: Callable[[Sequence[Seen]], bool]) -> list[Seen]:
        """The spans of `trace` once they satisfy `until`. Raises AssertionError after 10 s."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            found = [one for one in self.spans() if one.trace == trace]
            if until(found):
                return found
            time.sleep(0.02)
        raise AssertionError(f"the collector has {[(one.service, one.name) for one in found]}")


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """A collector that listens while open; on a free port unless one is named."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    collector.port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector
    finally:
        collector.unblock()
        server.stop(None).wait()


def _service(group: trace_pb2.ResourceSpans) -> str:
    named = {one.key: one.value.string_value for one in group.resource.attributes}
    return named.get("service.name", "")


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
