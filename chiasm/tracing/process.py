"""Traces of a whole process, on or off."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from chiasm import memory
from chiasm.tracing.settings import TraceSettings


@contextmanager
def traced(settings: TraceSettings | None, service: str) -> Iterator[None]:
    """Sends the spans of `service` while open; None sends none and loads nothing.

    Leaving sends what is left, for two seconds at most.
    """
    if settings is None:
        yield
        return
    with memory.lasting():
        from chiasm.tracing.export import Outbox, exporter, exporting, provider

    try:
        sending, making = exporter(settings), provider(settings, service)
    except Exception as error:  # its kinds are OpenTelemetry's own
        print(f"error: a variable OTEL_* cannot be used: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    with exporting(making, Outbox(sending)):
        yield
