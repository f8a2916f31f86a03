"""From a load to replicas."""

from dataclasses import replace

import pytest

from chiasm.sizing.answers import StepLine
from chiasm.sizing.fleet import (
    Impossible,
    Limits,
    Rates,
    Shape,
    Sized,
    Targets,
    Traffic,
    encode_load,
    size,
)

TRAFFIC = Traffic(10, (0.4, 0.4, 0.0, 0.0, 0.2), ((576, 0.7), (2304, 0.3)), 200, 150)
RATES = Rates(StepLine(0.01, 0.0001), StepLine(0.012, 0.00003))
SHAPE = Shape(row_bytes=8192, kv_token_bytes=131072)


def sized(
    traffic: Traffic = TRAFFIC, targets: Targets | None = None, limits: Limits | None = None
) -> Sized:
    return size(traffic, RATES, SHAPE, limits or Limits(), targets or Targets())


def test_the_needed_number_keeps_the_targets_and_one_less_does_not() -> None:
    plan = sized()
    assert plan.encoders is not None
    less, needed, more = plan.encoders.choices
    assert (less.replicas, needed.replicas, more.replicas) == (2, 3, 4)
    assert less.fault == "too busy"
    assert needed.fault == more.fault == ""
    assert needed.busy == pytest.approx(12 * (0.01 + 0.0001 * (0.7 * 576 + 0.3 * 2304)) / 3)
    services = plan.llm_services
    assert [one.fault != "" for one in services.choices][: services.needed] == [True] * (
        services.needed - 1
    ) + [False]


def test_a_shorter_wait_takes_more_encoders() -> None:
    plan = sized(targets=Targets(encode_wait=0.05))
    assert plan.encoders is not None
    less, needed, _ = plan.encoders.choices
    assert needed.replicas > 3
    assert less.fault == "too slow"
    assert needed.wait_p95 is not None
    assert needed.wait_p95 <= 0.05 < (less.wait_p95 or 0)


def test_what_caches_have_is_not_encoded_and_what_an_encoder_keeps_is_sent() -> None:
    half = replace(TRAFFIC, cache_hits=0.5, encoder_cache_hits=0.5)
    assert encode_load(half, RATES).rate == pytest.approx(12 / 4)
    plan = sized(half)
    assert plan.bytes_per_second == pytest.approx(6 * (0.7 * 576 + 0.3 * 2304) * 8192)


@pytest.mark.parametrize(
    "nothing", [{"pictures": (1.0,)}, {"cache_hits": 1.0}, {"encoder_cache_hits": 1.0}]
)
def test_where_nothing_is_encoded_there_are_no_encoders(nothing: dict[str, object]) -> None:
    assert sized(replace(TRAFFIC, **nothing)).encoders is None  # type: ignore[arg-type]


def test_sizes_vary_the_service() -> None:
    one = replace(TRAFFIC, rows=((576, 1.0),))
    assert encode_load(one, RATES).variation == 0
    assert encode_load(one, replace(RATES, encode_variation=0.3)).variation == pytest.approx(0.3)
    assert encode_load(TRAFFIC, RATES).variation > 0.2


def test_waits_that_no_number_keeps_are_told_with_the_flag() -> None:
    with pytest.raises(Impossible, match="raise --encode-wait"):
        sized(targets=Targets(encode_wait=1e-9))
    with pytest.raises(Impossible, match="raise --token-seconds"):
        sized(targets=Targets(token=0.001))
    with pytest.raises(Impossible, match="raise --kv-bytes"):
        sized(limits=Limits(kv_bytes=1 << 20))


def test_a_slower_token_is_bought_with_more_services() -> None:
    some = sized(targets=Targets(token=0.0125)).llm_services
    assert some.needed > sized().llm_services.needed
    assert some.choices[0].fault == "too slow: tokens"


def test_rough_figures_are_marked() -> None:
    assert any("own share" in note for note in sized().notes)
    quiet = sized(replace(TRAFFIC, requests=0.1))
    assert any("little busy" in note for note in quiet.notes)
    lumped = size(
        TRAFFIC, replace(RATES, step=StepLine(0.001, 0.0002)), SHAPE,
        Limits(decode_stretch=0), Targets(),
    )  # fmt: skip
    assert any("--decode-stretch" in note for note in lumped.notes)
