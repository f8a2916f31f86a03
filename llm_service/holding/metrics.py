"""What is counted of held embeddings."""

from collections.abc import Callable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from llm_service.holding.holding import Found
from llm_service.holding.memory import Cause


class HoldingMetrics:
    """Counters in the process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lookups = Counter(
            "chiasm_llm_reference_lookups",
            "References looked up, by where they were found.",
            ["found"],
            registry=registry,
        )
        self._dropped = Counter(
            "chiasm_llm_references_dropped",
            "Held embeddings given up, by cause: age or room.",
            ["cause"],
            registry=registry,
        )
        self._failures = Counter(
            "chiasm_llm_reference_store_failures",
            "Calls of the shared store that failed or gave damaged bytes.",
            registry=registry,
        )
        self._bytes = Gauge(
            "chiasm_llm_reference_bytes", "Bytes held for references.", registry=registry
        )
        # There from the start, so that the first event counts as an increase.
        for found in get_args(Found):
            self._lookups.labels(found)
        for cause in get_args(Cause):
            self._dropped.labels(cause)

    def found(self, found: Found) -> None:
        self._lookups.labels(found).inc()

    def dropped(self, cause: Cause) -> None:
        self._dropped.labels(cause).inc()

    def store_failed(self) -> None:
        self._failures.inc()

    def watch(self, byte_count: Callable[[], int]) -> None:
        """Reads the bytes held when they are scraped."""
        self._bytes.set_function(byte_count)
