"""What the encoder service counts, beside what every gRPC server of ours counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chiasm.telemetry import DURATION_BUCKETS

_IMAGE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_PATCH_BUCKETS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768)


class EncoderMetrics:
    """The service's figures in one process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.queued_images = self._gauge("queued_images", "Pictures that wait for the tower.")
        self.queued_bytes = self._gauge("queued_bytes", "Bytes of the files of those pictures.")
        self.queued_patches = self._gauge(
            "queued_patches", "Patches of those pictures; estimated until one is decoded."
        )
        self.in_flight_patches = self._gauge("in_flight_patches", "Patches in the tower now.")
        self.stage_seconds = Histogram(
            "chiasm_encoder_stage_seconds",
            "Time of a picture in a stage: queue (both waits), preprocess, forward (that it was "
            "in), reply (from features to message; the copy into bytes is not in it).",
            ["stage"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.batch_images = self._sizes(
            "batch_images", "Pictures that the tower took at once.", _IMAGE_BUCKETS
        )
        self.batch_patches = self._sizes(
            "batch_patches", "Patches that the tower took at once.", _PATCH_BUCKETS
        )
        self.encoded = self._count("encoded_images", "Pictures that went through the tower.")
        self.lookups = self._count(
            "cache_lookups", "Pictures asked for: hit, miss, or shared with a miss.", "result"
        )
        self.cache_bytes = self._gauge("cache_bytes", "Bytes of the embeddings kept.")
        self.cache_entries = self._gauge("cache_entries", "Embeddings kept.")
        self.evictions = self._count("cache_evictions", "Embeddings dropped to make room.")
        self.dropped = self._count(
            "dropped", "Pictures nobody waited for any more, before the stage.", "stage", "cause"
        )
        self.sent_bytes = self._count("sent_bytes", "Bytes of tensors put into replies.")
        # There from the start, so that the first event counts as an increase.
        for result in ("hit", "miss", "shared"):
            self.lookups.labels(result)
        for stage in ("preprocess", "forward"):
            for cause in ("cancelled", "deadline"):
                self.dropped.labels(stage, cause)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"chiasm_encoder_{name}", text, registry=self._registry)

    def _count(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"chiasm_encoder_{name}", text, labels, registry=self._registry)

    def _sizes(self, name: str, text: str, buckets: tuple[int, ...]) -> Histogram:
        return Histogram(f"chiasm_encoder_{name}", text, buckets=buckets, registry=self._registry)
