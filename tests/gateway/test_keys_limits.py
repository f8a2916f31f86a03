"""How much a key may ask for: the policy alone, with times that the test chooses."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys.allowance import Allowance, Refusal
from gateway.keys.limits import MINUTE, Limits, duration

CAPACITY = st.integers(1, 10_000)
STEPS = st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=200)


@dataclass(frozen=True)
class Step:
    """What comes after `seconds`: a request that is thought to take `aside` and takes `used`."""

    seconds: float
    aside: int
    used: int


STEP = st.builds(Step, st.floats(0, 30), st.integers(0, 500), st.integers(0, 2_000))


@given(limit=CAPACITY, waits=STEPS)
def test_no_stretch_of_time_has_more_requests_than_a_burst_and_its_own_share(
    limit: int, waits: list[float]
) -> None:
    allowance, now, entered = Allowance(Limits(limit), 0.0), 0.0, list[float]()
    for wait in waits:
        now += wait
        if allowance.enter(now) is None:
            allowance.leave()
            entered.append(now)
    for first, start in enumerate(entered):
        for last in range(first, len(entered)):
            most = limit * (1 + (entered[last] - start) / MINUTE)
            assert last - first + 1 <= most + 1e-6


@given(limit=CAPACITY, waits=STEPS)
def test_whoever_waits_as_long_as_told_is_let_in(limit: int, waits: list[float]) -> None:
    allowance, now = Allowance(Limits(limit), 0.0), 0.0
    for wait in waits:
        now += wait
        refusal = allowance.enter(now)
        if refusal is not None:
            assert 0 < refusal.seconds <= MINUTE
            now += refusal.seconds + 1e-6
            assert allowance.enter(now) is None
        allowance.leave()


@given(limit=CAPACITY, steps=st.lists(STEP, min_size=1, max_size=100))
def test_in_the_long_run_no_more_tokens_are_used_than_the_limit_and_what_the_last_ones_took_over(
    limit: int, steps: list[Step]
) -> None:
    allowance, now, used, largest = Allowance(Limits(tokens_per_minute=limit), 0.0), 0.0, 0, 0
    for step in steps:
        now += step.seconds
        if allowance.enter(now) is not None:
            continue
        allowance.leave()
        if allowance.set_aside(step.aside, now) is None:
            allowance.settle(step.aside, step.used, now)
            used, largest = used + step.used, max(largest, step.used)
    assert used <= limit * (1 + now / MINUTE) + largest + 1e-6


@given(limit=CAPACITY, aside=st.integers(0, 100_000))
def test_a_request_of_any_size_gets_in_when_nothing_else_runs(limit: int, aside: int) -> None:
    allowance = Allowance(Limits(tokens_per_minute=limit), 0.0)
    assert allowance.enter(0.0) is None
    assert allowance.set_aside(aside, 0.0) is None


@given(limit=CAPACITY, steps=st.lists(STEP, max_size=50))
def test_what_was_set_aside_and_not_used_is_given_back(limit: int, steps: list[Step]) -> None:
    allowance = Allowance(Limits(tokens_per_minute=limit), 0.0)
    before = allowance.headers(0.0)
    for step in steps:
        assert allowance.set_aside(step.aside, 0.0) is None
        allowance.settle(step.aside, 0, 0.0)
    assert allowance.headers(0.0) == before


def test_requests_at_once_are_bounded_and_a_place_is_free_again_at_the_end() -> None:
    allowance = Allowance(Limits(concurrent_requests=2), 0.0)
    assert allowance.enter(0.0) is None
    assert allowance.enter(0.0) is None
    assert allowance.enter(0.0) == Refusal("2 requests at once", 1.0)
    allowance.leave()
    assert allowance.enter(0.0) is None


def test_a_refused_request_uses_nothing_up() -> None:
    allowance = Allowance(Limits(requests_per_minute=60, concurrent_requests=1), 0.0)
    assert allowance.enter(0.0) is None
    for _ in range(100):
        assert allowance.enter(0.0) is not None
    assert allowance.headers(0.0)["x-ratelimit-remaining-requests"] == "59"


def test_the_headers_tell_limit_rest_and_the_time_until_all_is_there_again() -> None:
    allowance = Allowance(Limits(60, 6_000), 0.0)
    assert allowance.enter(0.0) is None
    assert allowance.set_aside(1_000, 0.0) is None
    assert allowance.headers(0.5) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5050",
        "x-ratelimit-reset-tokens": "9.5s",
    }
    assert Allowance(Limits(), 0.0).headers(0.0) == {}


def test_a_changed_limit_counts_at_once_and_forgets_nothing() -> None:
    allowance = Allowance(Limits(requests_per_minute=10), 0.0)
    for _ in range(8):
        assert allowance.enter(0.0) is None
    allowance.change(Limits(requests_per_minute=9), 0.0)
    assert allowance.enter(0.0) is None
    assert allowance.enter(0.0) is not None
    allowance.change(Limits(), 0.0)
    assert all(allowance.enter(0.0) is None for _ in range(100))


def test_a_clock_that_goes_back_gives_nothing() -> None:
    allowance = Allowance(Limits(requests_per_minute=1), 100.0)
    assert allowance.enter(100.0) is None
    assert allowance.enter(40.0) is not None
    assert allowance.enter(100.0) is not None
    assert allowance.enter(160.0) is None


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0s"), (0.0001, "1ms"), (0.017, "17ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"),
        (60, "1m0s"), (90.951, "1m30.951s"), (360, "6m0s"), (3600, "1h0m0s"), (3_661.5, "1h1m1.5s"),
    ],
)  # fmt: skip
def test_times_are_told_in_the_headers_own_form(seconds: float, told: str) -> None:
    assert duration(seconds) == told
