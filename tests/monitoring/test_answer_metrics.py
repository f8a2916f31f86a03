"""What is counted of an answer, by the messages that make it."""

import time

import pytest
from prometheus_client import CollectorRegistry

from chiasm.v1 import llm_service_pb2 as pb
from llm_service.engine.values import Delta
from llm_service.metrics import STAGES, LlmMetrics, TokenPace

ITL = "chiasm_llm_inter_token_seconds"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> LlmMetrics:
    return LlmMetrics(registry)


def delta(*tokens: int, choice: int = 0) -> Delta:
    return Delta("", tokens, choice=choice)


def test_each_token_after_those_that_came_first_has_a_time(
    registry: CollectorRegistry, metrics: LlmMetrics
) -> None:
    pace = TokenPace(metrics)
    pace.note([delta(1, 2)])
    assert registry.get_sample_value(f"{ITL}_count") == 0
    time.sleep(0.03)
    pace.note([delta(3, 4, 5)])
    pace.note([delta()])
    assert registry.get_sample_value(f"{ITL}_count") == 3
    # Three tokens came together: each has a third of the time.
    assert registry.get_sample_value(f"{ITL}_bucket", {"le": "0.005"}) == 0
    assert registry.get_sample_value(f"{ITL}_sum") == pytest.approx(0.03, abs=0.02)


def test_choices_are_timed_apart(registry: CollectorRegistry, metrics: LlmMetrics) -> None:
    pace = TokenPace(metrics)
    pace.note([delta(1), delta(1, choice=1)])
    pace.note([delta(2)])
    pace.note([delta(2, choice=2)])
    assert registry.get_sample_value(f"{ITL}_count") == 1


def test_a_whole_answer_is_counted_by_stage_and_choice(
    registry: CollectorRegistry, metrics: LlmMetrics
) -> None:
    timings = pb.GenerateTimings(
        fetch_seconds=0.3, queue_seconds=0.1, prefill_seconds=0.2, decode_seconds=1, total_seconds=2
    )
    ends = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_TOOL_CALLS, pb.FINISH_REASON_LENGTH)
    choices = [pb.FinishedChoice(choice_index=n, reason=end) for n, end in enumerate(ends)]
    metrics.answered(pb.Finished(choices=choices, timings=timings), [5, 7, 9], prepared=0.4)
    stages = [
        registry.get_sample_value("chiasm_llm_stage_seconds_sum", {"stage": stage})
        for stage in STAGES
    ]
    assert stages == pytest.approx([0.1, 0.3, 0.1, 0.2, 1])
    assert registry.get_sample_value("chiasm_llm_answer_seconds_sum") == 2
    assert registry.get_sample_value("chiasm_llm_completion_tokens_sum") == 21
    for reason in ("stop", "tool_calls", "length"):
        name = "chiasm_llm_finished_choices_total"
        assert registry.get_sample_value(name, {"reason": reason}) == 1


def test_series_of_ends_and_stages_are_there_before_the_first_answer(
    registry: CollectorRegistry, metrics: LlmMetrics
) -> None:
    assert metrics
    for reason in ("stop", "tool_calls", "length"):
        name = "chiasm_llm_finished_choices_total"
        assert registry.get_sample_value(name, {"reason": reason}) == 0
    for stage in STAGES:
        assert registry.get_sample_value("chiasm_llm_stage_seconds_count", {"stage": stage}) == 0
