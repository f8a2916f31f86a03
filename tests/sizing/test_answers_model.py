"""What one LLM service does, beside a simulation with the engine's own scheduler."""

import math
from dataclasses import replace

import pytest

from benchmarks.sizing import run_engine
from chiasm.sizing.answers import Answers, Engine, StepLine, highest_rate, kv_tokens, pace
from chiasm.sizing.queueing import Overloaded

LINE = StepLine(0.012, 0.00012)


@pytest.mark.parametrize(
    ("line", "prompt", "written"),
    [(LINE, 50, 200), (StepLine(0.02, 0.00002), 700, 100), (LINE, 700, 20)],
)
def test_means_are_those_of_the_scheduler(line: StepLine, prompt: int, written: int) -> None:
    engine = Engine(line)
    rate = 0.6 * highest_rate(engine, Answers(1, prompt, prompt, written))[0]
    answers = Answers(rate, prompt, prompt, written)
    said, seen = pace(engine, answers), run_engine(engine, answers, 1500)
    assert said.running == pytest.approx(seen.running, rel=0.15)
    assert said.token_seconds == pytest.approx(seen.token_seconds, rel=0.15)
    assert 0.5 < said.first_token_seconds / seen.first_token_seconds < 2
    assert said.utilisation == pytest.approx(0.6)


def test_the_scheduler_falls_behind_beyond_the_highest_rate_and_not_before() -> None:
    engine = Engine(StepLine(0.02, 0.00002), max_running=16)
    shape = Answers(1, 50, 50, 100)
    rate, bound = highest_rate(engine, shape)
    assert bound == "running"
    assert run_engine(engine, replace(shape, rate=0.8 * rate), 500).waiting_at_end < 10
    assert run_engine(engine, replace(shape, rate=1.5 * rate), 500).waiting_at_end > 80


def test_little_memory_bounds_the_rate() -> None:
    engine = Engine(LINE, kv_tokens=3000)
    assert highest_rate(engine, Answers(1, 700, 700, 100))[1] == "memory"
    roomy = highest_rate(replace(engine, kv_tokens=math.inf), Answers(1, 700, 700, 100))[0]
    assert highest_rate(engine, Answers(1, 700, 700, 100))[0] < roomy


def test_prompts_bound_the_rate_where_tokens_are_dear() -> None:
    engine = Engine(StepLine(0.001, 0.001))
    rate, bound = highest_rate(engine, Answers(1, 2000, 2000, 50))
    assert bound == "prompts"
    # Reading alone takes 2 s of each.
    assert rate < 0.5


def test_more_than_the_highest_rate_is_overload() -> None:
    rate = highest_rate(Engine(LINE), Answers(1, 100, 100, 100))[0]
    with pytest.raises(Overloaded):
        pace(Engine(LINE), Answers(rate * 1.001, 100, 100, 100))
    assert pace(Engine(LINE), Answers(rate * 0.999, 100, 100, 100)).utilisation < 1


def test_memory_is_counted_in_whole_blocks() -> None:
    assert kv_tokens(Answers(1, 10, 10, 7), 3) == 3 * 32
