"""What the LLM service counts."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chiasm.telemetry import DURATION_BUCKETS
from llm_service.engine.values import EngineStats

_TOKEN_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class LlmMetrics:
    """Counters of the servicer, in the process's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.images = Counter(
            "chiasm_llm_images",
            "Pictures of admitted requests, by the path that their features took.",
            ["source"],
            registry=registry,
        )
        self.image_tokens = Counter(
            "chiasm_llm_image_tokens", "Placeholder tokens of pictures.", registry=registry
        )
        self.prompt_tokens = Histogram(
            "chiasm_llm_prompt_tokens", "Tokens of a prompt.", buckets=_TOKEN_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.fetch_seconds = Histogram(
            "chiasm_llm_image_fetch_seconds",
            "Time to have one picture's features, by path.",
            ["source"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "chiasm_llm_time_to_first_token_seconds",
            "Time from a call's arrival to its first token.",
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.cache_bytes = Gauge(
            "chiasm_llm_embedding_cache_bytes", "Bytes of the embeddings kept.", registry=registry
        )
        self.cache_evictions = Counter(
            "chiasm_llm_embedding_cache_evictions",
            "Embeddings dropped to make room.",
            registry=registry,
        )
        self.refused = Counter(
            "chiasm_llm_refused_requests",
            "Requests beyond the admission limit.",
            registry=registry,
        )


class EngineCollector(Collector):
    """Reads the engine's figures when they are scraped."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        now = self._stats()
        for name, text, value in (
            ("running_sequences", "Sequences that generate.", now.running),
            ("waiting_sequences", "Sequences that wait for the engine.", now.waiting),
            ("kv_blocks_used", "KV blocks in use.", now.blocks_used),
            ("kv_blocks", "KV blocks in all.", now.blocks_total),
            ("kv_blocks_cached", "KV blocks in no use that can be found again.", now.blocks_cached),
        ):
            yield GaugeMetricFamily(f"chiasm_llm_{name}", text, value)
        for name, text, value in (
            ("generated_tokens", "Tokens generated.", now.tokens_generated_total),
            ("prefill_tokens", "Prompt tokens computed.", now.prefill_tokens_total),
            ("engine_steps", "Steps of the engine.", now.steps_total),
            ("cancelled_sequences", "Sequences whose caller left.", now.cancelled_total),
            ("preempted_sequences", "Preemptions by recompute.", now.preempted_total),
            (
                "prefix_cache_query_tokens",
                "Prompt tokens looked up in the prefix cache.",
                now.prefix_cache_query_tokens_total,
            ),
            (
                "prefix_cache_hit_tokens",
                "Prompt tokens found there and not computed.",
                now.prefix_cache_hit_tokens_total,
            ),
        ):
            yield CounterMetricFamily(f"chiasm_llm_{name}", text, value)
