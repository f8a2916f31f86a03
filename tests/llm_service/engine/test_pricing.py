"""How many prompt tokens fit beside running answers follows from what steps cost."""

from hypothesis import given
from hypothesis import strategies as st

from llm_service.engine.pricing import StepPrices

SECONDS = st.floats(1e-6, 10)
STRETCH = st.floats(1, 20)


def test_the_line_goes_through_both_measurements() -> None:
    prices = StepPrices.fit((1, 0.013), (65, 0.077))
    assert abs(prices.fixed - 0.012) < 1e-12
    assert abs(prices.each - 0.001) < 1e-12
    assert prices.prompt_tokens_beside(4, 2.0) == 16
    assert prices.prompt_tokens_beside(32, 2.0) == 44


@given(SECONDS, SECONDS, st.integers(1, 512), STRETCH)
def test_a_step_with_prompts_keeps_to_the_stretch(
    few: float, many: float, answers: int, stretch: float
) -> None:
    prices = StepPrices.fit((1, few), (64, many))
    tokens = prices.prompt_tokens_beside(answers, stretch)
    assert tokens >= 1
    if tokens > 1:
        allowed = stretch * prices.seconds(answers)
        assert prices.seconds(answers + tokens) <= allowed * (1 + 1e-9)
        assert prices.seconds(answers + tokens + 1) > allowed * (1 - 1e-9)


@given(SECONDS, SECONDS, st.integers(1, 511), STRETCH)
def test_more_answers_never_make_room_for_fewer_prompt_tokens(
    few: float, many: float, answers: int, stretch: float
) -> None:
    prices = StepPrices.fit((1, few), (64, many))
    less = prices.prompt_tokens_beside(answers, stretch)
    assert prices.prompt_tokens_beside(answers + 1, stretch) >= less
