"""What became of the spans of this process, for Prometheus."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

Cause = Literal["queue_full", "export_failed", "stopped"]
CAUSES: Final[tuple[Cause, ...]] = ("queue_full", "export_failed", "stopped")


@dataclass(frozen=True)
class Sent:
    """Spans that the collector took, and those that were lost, by cause."""

    exported: int
    dropped: Mapping[Cause, int]


class SpanCounts(Collector):
    """Counts of spans; there only where traces are on."""

    def __init__(self, sent: Callable[[], Sent]) -> None:
        self._sent = sent

    def collect(self) -> Iterator[Metric]:
        sent = self._sent()
        yield CounterMetricFamily(
            "chiasm_trace_exported_spans", "Spans that the collector took.", value=sent.exported
        )
        dropped = CounterMetricFamily(
            "chiasm_trace_dropped_spans",
            "Spans that were lost: queue_full, export_failed (the collector did not take them), "
            "stopped (left when the process ended).",
            labels=["cause"],
        )
        for cause, count in sent.dropped.items():
            dropped.add_metric([cause], count)
        yield dropped
