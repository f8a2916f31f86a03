"""What the LLM service counts of its encoders."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chiasm.telemetry import DURATION_BUCKETS
from llm_service.vision.source import Fetched
from llm_service.vision.standing import Cause, Standing, State

_STATES: tuple[State, ...] = ("unknown", "ready", "ejected", "foreign")


class FleetMetrics:
    """The figures of the fleet in one process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.attempts = self._count(
            "attempts", "Attempts to have a picture encoded, by how they ended.", "outcome"
        )
        self.retries = self._count("retries", "Attempts beyond a picture's first one.")
        self.unaffordable = self._count(
            "retries_refused", "Further attempts that the retry budget did not allow."
        )
        self.hedges = self._count("hedges", "Second attempts begun because the first was late.")
        self.ejections = self._count("ejections", "Encoders taken out, by cause.", "cause")
        # There from the start, so that the first one counts as an increase.
        for cause in Cause:
            self.ejections.labels(cause.value)
        self.fallbacks = self._count("fallbacks", "Pictures given to the local tower instead.")
        self._received = self._count("received_bytes", "Bytes of embeddings taken from encoders.")
        self._transfer = Histogram(
            "chiasm_llm_encoder_transfer_seconds",
            "Time of an answered attempt beyond what the encoder says that it took: both ways "
            "over the network and the checks.",
            buckets=DURATION_BUCKETS,
            registry=registry,
        )

    def received(self, fetched: Fetched) -> None:
        """Counts an embedding that came and was found right, by one attempt."""
        self._received.inc(fetched.rows.byte_count)
        self._transfer.observe(fetched.fetch_seconds - fetched.encode_seconds)

    def watch(
        self, standings: Callable[[], Sequence[Standing]], outstanding: Callable[[], int]
    ) -> None:
        """Shows the fleet's state from now on."""
        self._registry.register(_Fleet(standings, outstanding))

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"chiasm_llm_encoder_{name}", text, labels, registry=self._registry)


class _Fleet(Collector):
    def __init__(
        self, standings: Callable[[], Sequence[Standing]], outstanding: Callable[[], int]
    ) -> None:
        self._standings = standings
        self._outstanding = outstanding

    def collect(self) -> Iterator[Metric]:
        by_state = Tally(one.state for one in self._standings())
        encoders = GaugeMetricFamily(
            "chiasm_llm_encoders", "Encoders, by whether they are asked.", labels=["state"]
        )
        for state in _STATES:
            encoders.add_metric([state], by_state[state])
        yield encoders
        yield GaugeMetricFamily(
            "chiasm_llm_encoder_outstanding_rows",
            "Rows asked of encoders and not answered yet.",
            self._outstanding(),
        )
