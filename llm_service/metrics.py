"""What the LLM service counts."""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chiasm.telemetry import DURATION_BUCKETS
from chiasm.v1 import llm_service_pb2
from llm_service.engine.values import Delta, EngineStats

_S = llm_service_pb2
_TOKEN_BUCKETS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Of an answer, in order; together they make its seconds, but for what passes between them.
STAGES = ("prepare", "fetch", "queue", "prefill", "decode")
_ENDS = {
    _S.FINISH_REASON_STOP: "stop",
    _S.FINISH_REASON_LENGTH: "length",
    _S.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


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
        self.inter_token_seconds = Histogram(
            "chiasm_llm_inter_token_seconds",
            "Time from one token of an answer to the next, as the call sees them.",
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._answer_seconds = Histogram(
            "chiasm_llm_answer_seconds",
            "Time from a call's arrival to the end of its whole answer.",
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._stage_seconds = Histogram(
            "chiasm_llm_stage_seconds",
            "Time of a whole answer in a stage: prepare (check, measure, tokenize, grammar), fetch "
            "(of its slowest picture), queue, prefill, decode.",
            ["stage"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._completion_tokens = Histogram(
            "chiasm_llm_completion_tokens",
            "Tokens of a finished choice.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._choices = Counter(
            "chiasm_llm_finished_choices",
            "Choices of whole answers, by why each ended.",
            ["reason"],
            registry=registry,
        )
        # Series that are there from the start, so that the first event counts as an increase.
        for stage in STAGES:
            self._stage_seconds.labels(stage)
        for reason in _ENDS.values():
            self._choices.labels(reason)
        for source in ("cache", "remote", "local", "caller", "reference"):
            self.images.labels(source)

    def answered(
        self, told: llm_service_pb2.Finished, completion_tokens: Sequence[int], prepared: float
    ) -> None:
        """Counts a whole answer by what its last message tells.

        Args:
            completion_tokens: of each choice.
            prepared: seconds from the call's arrival to the engine's queue.
        """
        times = told.timings
        self._answer_seconds.observe(times.total_seconds)
        for stage, seconds in (
            ("prepare", max(0.0, prepared - times.fetch_seconds)),
            ("fetch", times.fetch_seconds),
            ("queue", times.queue_seconds),
            ("prefill", times.prefill_seconds),
            ("decode", times.decode_seconds),
        ):
            self._stage_seconds.labels(stage).observe(seconds)
        for choice, tokens in zip(told.choices, completion_tokens, strict=True):
            self._choices.labels(_ENDS[choice.reason]).inc()
            self._completion_tokens.observe(tokens)


class TokenPace:
    """The times between the tokens of one call's choices.

    Tokens that come together share the time since the one before them.
    """

    def __init__(self, metrics: LlmMetrics) -> None:
        self._observe = metrics.inter_token_seconds.observe
        # time.monotonic() of the last token, by choice.
        self._last: dict[int, float] = {}

    def note(self, deltas: Sequence[Delta]) -> None:
        """Takes note of what has just come."""
        now = time.monotonic()
        for delta in deltas:
            count = len(delta.token_ids)
            if not count:
                continue
            last = self._last.get(delta.choice)
            self._last[delta.choice] = now
            if last is not None:
                for _ in range(count):
                    self._observe((now - last) / count)


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
