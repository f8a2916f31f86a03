"""Waits before servers: what is exact, what must hold, and a simulation beside the rest."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sizing import Cell, simulated
from chiasm.sizing.queueing import Load, OneQueue, Overloaded, Placed, thinned, utilisation

ALONE = (0.0, 1.0)


def erlang_c(servers: int, offered: float) -> float:
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("servers", [1, 2, 5, 16])
@pytest.mark.parametrize("busy", [0.2, 0.7, 0.95])
def test_exponential_services_that_come_alone_are_erlangs(servers: int, busy: float) -> None:
    load = Load(busy * servers / 0.3, ALONE, 0.3, variation=1)
    waits = OneQueue(load, servers)
    delayed = erlang_c(servers, busy * servers)
    gap = 0.3 / servers
    assert waits.mean == pytest.approx(delayed * gap / (1 - busy), rel=1e-6, abs=1e-9)
    expected = max(math.log(delayed / 0.05) * gap / (1 - busy), 0) if delayed > 0 else 0
    assert waits.quantile(0.95) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("variation", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_one_server_has_the_mean_of_pollaczek_and_khinchin(variation: float, group: int) -> None:
    busy, seconds = 0.8, 2.0
    load = Load(busy / seconds / group, (0.0,) * group + (1.0,), seconds, variation)
    expected = seconds * (busy * (1 + variation) + group - 1) / (2 * (1 - busy))
    assert OneQueue(load, 1).mean == pytest.approx(expected, rel=1e-5)
    assert Placed(load, 1).mean == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("cell", "placed", "within"),
    [
        (Cell(0.8, 4, 0.0, 4), False, 0.15),
        (Cell(0.7, 8, 2.0, 1), False, 0.15),
        (Cell(0.7, 4, 0.0, 2), True, 0.2),
        (Cell(0.8, 8, 1.0, 4), True, 0.2),
    ],
)
def test_means_and_tails_are_those_of_a_simulation(cell: Cell, placed: bool, within: float) -> None:
    seen = simulated(cell, placed=placed, members=3000, copies=60)
    said = (Placed if placed else OneQueue)(cell.load, cell.servers)
    assert said.mean == pytest.approx(seen.mean, rel=within)
    assert said.quantile(0.95) == pytest.approx(seen.p95, rel=within)


def test_placing_at_one_of_two_is_worse_than_one_queue_and_far_better_than_by_chance() -> None:
    load = Load(16 * 0.9, ALONE, 1.0, variation=1)
    by_chance = 0.9 / 0.1
    assert OneQueue(load, 16).mean * 2 < Placed(load, 16).mean < by_chance / 3


@settings(max_examples=25, deadline=None)
@given(
    servers=st.integers(1, 12),
    busy=st.floats(0.05, 0.95),
    variation=st.floats(0, 3),
    group=st.integers(1, 8),
    seconds=st.floats(1e-4, 100),
)
def test_waits_are_ordered_and_scale_with_the_service(
    servers: int, busy: float, variation: float, group: int, seconds: float
) -> None:
    sizes = (0.0,) * group + (1.0,)
    for kind in (OneQueue, Placed):
        unit = kind(Load(busy * servers / group, sizes, 1.0, variation), servers)
        load = Load(busy * servers / group / seconds, sizes, seconds, variation)
        waits = kind(load, servers)
        assert utilisation(load, servers) == pytest.approx(busy)
        assert 0 <= waits.quantile(0.5) <= waits.quantile(0.95) <= waits.quantile(0.99)
        assert waits.mean == pytest.approx(unit.mean * seconds, rel=1e-6)
        more = kind(load, servers + 1)
        # What a group's members wait for one another is added whole to `Placed`, which makes a step
        # where one server more would take all of them.
        slack = 1.001 if kind is OneQueue else 1.3
        assert more.mean <= waits.mean * slack + 1e-6 * seconds


@pytest.mark.parametrize("kind", [OneQueue, Placed])
def test_as_much_work_as_servers_is_overload(kind: type[OneQueue] | type[Placed]) -> None:
    with pytest.raises(Overloaded):
        kind(Load(4, ALONE, 0.5), 2)
    assert kind(Load(3.99, ALONE, 0.5), 2).mean > 10


def test_where_nothing_comes_nobody_waits() -> None:
    for kind in (OneQueue, Placed):
        waits = kind(Load(0, ALONE, 1.0), 3)
        assert waits.mean == waits.quantile(0.99) == 0
        assert kind(Load(5, (1.0,), 1.0), 3).mean == 0


def test_many_servers_and_long_waits_do_not_underflow() -> None:
    tight = OneQueue(Load(1000 * 0.99 / 8, (0.0,) * 8 + (1.0,), 1.0, 1), 1000)
    assert 0 < tight.mean < tight.quantile(0.999) < 10


def test_members_that_a_cache_has_leave_their_group() -> None:
    assert thinned((0.25, 0.0, 0.75), 0.5) == pytest.approx((0.4375, 0.375, 0.1875))
    assert thinned((0.0, 1.0), 0) == (1.0, 0.0)


@pytest.mark.parametrize("sizes", [(0.5, 0.4), (1.5, -0.5)])
def test_probabilities_that_are_none_are_refused(sizes: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="add up to 1"):
        Load(1, sizes, 1)
