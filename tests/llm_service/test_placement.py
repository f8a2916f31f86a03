"""Placement: which encoder a picture goes to, and in which order others are tried."""

import random
from collections import Counter

from hypothesis import assume, given
from hypothesis import strategies as st

from llm_service.vision.placement import CROWDED, Seat, order, ranks

DIGESTS = st.binary(min_size=32, max_size=32)
SEATS = st.lists(
    st.builds(Seat, st.text(min_size=1, max_size=20), st.integers(0, 10**6)),
    unique_by=lambda seat: seat.name,
    max_size=40,
)


def idle(count: int) -> list[Seat]:
    return [Seat(f"10.0.0.{number}:50061", 0) for number in range(count)]


def crowded(seat: Seat, seats: list[Seat]) -> bool:
    mean = sum(one.outstanding for one in seats) / len(seats)
    return seat.outstanding > CROWDED * mean


def digests(count: int) -> list[bytes]:
    return [number.to_bytes(8, "little") * 4 for number in range(count)]


@given(SEATS, DIGESTS)
def test_every_encoder_has_one_place_in_the_order(seats: list[Seat], digest: bytes) -> None:
    assert sorted(order(seats, digest)) == list(range(len(seats)))


@given(SEATS, DIGESTS, st.randoms())
def test_the_order_of_encoders_does_not_depend_on_how_they_are_listed(
    seats: list[Seat], digest: bytes, chance: random.Random
) -> None:
    shuffled = list(seats)
    chance.shuffle(shuffled)
    assert [seats[at].name for at in order(seats, digest)] == [
        shuffled[at].name for at in order(shuffled, digest)
    ]


@given(SEATS, DIGESTS)
def test_of_the_first_two_ranks_the_less_loaded_is_asked_unless_it_is_crowded(
    seats: list[Seat], digest: bytes
) -> None:
    assume(seats)
    first_two = ranks([seat.name for seat in seats], digest)[:2]
    fewer = min((seats[at] for at in first_two), key=lambda seat: seat.outstanding)
    asked = seats[order(seats, digest)[0]]
    assert asked is fewer or crowded(fewer, seats)
    assert not crowded(asked, seats)


@given(SEATS, DIGESTS)
def test_after_a_failure_the_others_are_tried_by_rank(seats: list[Seat], digest: bytes) -> None:
    assume(seats)
    first, *others = order(seats, digest)
    ranked = ranks([seat.name for seat in seats], digest)
    assert others == [at for at in ranked if at != first]


@given(SEATS, DIGESTS)
def test_a_service_that_knows_a_part_of_the_fleet_ranks_it_alike(
    seats: list[Seat], digest: bytes
) -> None:
    names = [seat.name for seat in seats]
    part = names[: len(names) // 2]
    whole = [names[at] for at in ranks(names, digest) if names[at] in part]
    assert [part[at] for at in ranks(part, digest)] == whole


def test_no_encoders_give_no_order_and_one_is_asked_whatever_it_has_outstanding() -> None:
    assert order([], b"\x01" * 32) == []
    assert order([Seat("a:1", 10**9)], b"\x01" * 32) == [0]


def test_of_two_encoders_equally_loaded_the_first_rank_is_asked() -> None:
    for digest in digests(50):
        loaded = [Seat(seat.name, 700) for seat in idle(2)]
        assert order(loaded, digest) == ranks([seat.name for seat in loaded], digest)


def test_a_picture_that_everybody_sends_is_spread_beyond_its_first_two_ranks() -> None:
    seats = idle(100)
    for _ in range(1000):
        at = order(seats, b"\x07" * 32)[0]
        seats[at] = Seat(seats[at].name, seats[at].outstanding + 100)
    assert sum(seat.outstanding > 0 for seat in seats) > 20


def test_a_picture_comes_back_to_the_same_encoder_while_loads_are_equal() -> None:
    for digest in digests(50):
        assert len({order(idle(7), digest)[0] for _ in range(5)}) == 1


def test_pictures_spread_evenly() -> None:
    seats = idle(10)
    shares = Counter(order(seats, digest)[0] for digest in digests(10_000))
    assert len(shares) == 10
    assert 800 < min(shares.values()) <= max(shares.values()) < 1200


def test_an_encoder_that_leaves_moves_only_its_own_pictures() -> None:
    before, after = idle(8), idle(7)
    for digest in digests(500):
        was = before[order(before, digest)[0]]
        if was in after:
            assert after[order(after, digest)[0]] == was


def test_the_pictures_of_a_request_go_round_a_loaded_encoder() -> None:
    seats = [Seat("a:1", 0), Seat("b:1", 10**6), Seat("c:1", 0)]
    asked = Counter(seats[order(seats, digest)[0]].name for digest in digests(300))
    assert asked["b:1"] == 0
