"""How many prompt tokens fit beside running answers follows from what steps cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_service.engine.pricing import StepLimits, StepPrices

SECONDS = st.floats(1e-6, 10)
STRETCH = st.floats(1.01, 20)
ANSWERS = st.integers(1, 511)
PRICES = st.builds(lambda few, many: StepPrices.fit((1, few), (64, many)), SECONDS, SECONDS)


def test_the_line_goes_through_both_measurements() -> None:
    prices = StepPrices.fit((1, 0.013), (65, 0.077))
    assert prices.fixed == pytest.approx(0.012)
    assert prices.each == pytest.approx(0.001)


def test_beside_answers_that_began_in_calm_a_step_takes_twice_as_long_and_no_more() -> None:
    limits = StepLimits(StepPrices(0.012, 0.001), stretch=2)
    calm = limits.pace(4, 0)
    assert calm == pytest.approx(0.016)
    assert limits.prompt_tokens_beside(4, calm) == 16
    # Three more answers make the step longer, so prompts get less of it.
    assert limits.prompt_tokens_beside(7, calm) == 13


def test_answers_that_began_among_prompts_leave_more_to_prompts_but_not_ever_more() -> None:
    limits = StepLimits(StepPrices(0.012, 0.001), stretch=2)
    assert limits.prompt_tokens_beside(4, limits.pace(4, 8)) == 32
    # However long the steps were in which they began: twice three times what answers take.
    assert limits.prompt_tokens_beside(4, limits.pace(4, 500)) == 6 * 16 - 16


def test_many_answers_leave_prompts_half_of_what_they_would_get_in_calm() -> None:
    limits = StepLimits(StepPrices(0.012, 0.001), stretch=2)
    assert limits.prompt_tokens_beside(52, limits.pace(1, 0)) == 32
    assert limits.prompt_tokens_beside(52, None) == 64


@given(PRICES, ANSWERS, STRETCH)
def test_a_step_with_prompts_keeps_to_the_stretch(
    prices: StepPrices, answers: int, stretch: float
) -> None:
    limits = StepLimits(prices, stretch)
    tokens = limits.prompt_tokens_beside(answers, limits.pace(answers, 0))
    assert tokens >= 1
    if tokens > 1:
        allowed = stretch * prices.seconds(answers)
        assert prices.seconds(answers + tokens) <= allowed * (1 + 1e-9)
        assert prices.seconds(answers + tokens + 1) > allowed * (1 - 1e-9)


@given(PRICES, ANSWERS, st.integers(0, 4096), st.integers(0, 4096), STRETCH)
def test_who_began_slower_never_makes_room_for_fewer_prompt_tokens(
    prices: StepPrices, answers: int, beside: int, further: int, stretch: float
) -> None:
    limits = StepLimits(prices, stretch)
    swift, slow = (limits.pace(answers, many) for many in (beside, beside + further))
    assert limits.prompt_tokens_beside(answers, slow) >= limits.prompt_tokens_beside(answers, swift)


@given(PRICES, ANSWERS, STRETCH)
def test_generations_of_answers_do_not_slow_each_other_without_end(
    prices: StepPrices, answers: int, stretch: float
) -> None:
    limits = StepLimits(prices, stretch)
    pace = limits.pace(answers, 0)
    for _ in range(50):
        tokens = limits.prompt_tokens_beside(answers, pace)
        pace = limits.pace(answers, tokens)
    bound = max(3 * stretch * prices.seconds(answers), prices.seconds(answers + 1))
    assert prices.seconds(answers + tokens) <= bound * (1 + 1e-9)
