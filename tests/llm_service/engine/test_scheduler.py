"""The scheduler's promises, on integers alone."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.block_pool import ZERO_BLOCK, BlockPool, OutOfBlocks
from llm_service.engine.scheduler import Scheduler, Step


def _chunks(step: Step) -> list[tuple[int, int, int, bool]]:
    return [(chunk.key, chunk.start, chunk.length, chunk.samples) for chunk in step.chunks]


def _next(scheduler: Scheduler) -> list[tuple[int, int, int, bool]]:
    step = scheduler.plan()
    scheduler.commit(step)
    return _chunks(step)


def test_no_sequence_gives_an_empty_step() -> None:
    assert Scheduler(BlockPool(4, 4), 8, 2).plan() == Step(())


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_samples() -> None:
    scheduler = Scheduler(BlockPool(20, 4), step_token_budget=8, max_running=4)
    scheduler.add(7, 19, 30)
    assert [_next(scheduler) for _ in range(4)] == [
        [(7, 0, 8, False)],
        [(7, 8, 8, False)],
        [(7, 16, 3, True)],
        [(7, 19, 1, True)],
    ]


def test_running_sequences_decode_while_a_prompt_takes_what_is_left_of_the_budget() -> None:
    scheduler = Scheduler(BlockPool(40, 4), step_token_budget=8, max_running=4)
    scheduler.add(1, 3, 20)
    scheduler.add(2, 2, 20)
    assert _next(scheduler) == [(1, 0, 3, True), (2, 0, 2, True)]
    scheduler.add(3, 50, 60)
    assert _next(scheduler) == [(1, 3, 1, True), (2, 2, 1, True), (3, 0, 6, False)]


def test_a_place_that_is_left_goes_to_the_longest_waiting() -> None:
    scheduler = Scheduler(BlockPool(40, 4), step_token_budget=64, max_running=2)
    for key in (1, 2, 3):
        scheduler.add(key, 4, 20)
    assert [chunk[0] for chunk in _next(scheduler)] == [1, 2]
    scheduler.remove(1)
    assert [chunk[0] for chunk in _next(scheduler)] == [2, 3]


def test_the_youngest_gives_its_blocks_to_the_oldest_and_starts_over() -> None:
    pool = BlockPool(5, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=4)
    scheduler.add(1, 7, 16)
    scheduler.add(2, 4, 16)
    assert _next(scheduler) == [(1, 0, 7, True), (2, 0, 4, True)]
    assert _next(scheduler) == [(1, 7, 1, True), (2, 4, 1, True)]
    assert pool.free_count == 0
    assert _next(scheduler) == [(1, 8, 1, True)]
    assert (scheduler.preempted_total, scheduler.waiting_count) == (1, 1)
    scheduler.remove(1)
    assert _next(scheduler) == [(2, 0, 6, True)]


def test_blocks_are_fresh_in_the_first_chunk_that_has_them_only() -> None:
    scheduler = Scheduler(BlockPool(20, 4), step_token_budget=6, max_running=1)
    scheduler.add(1, 8, 20)
    fresh = []
    for _ in range(3):
        step = scheduler.plan()
        scheduler.commit(step)
        fresh.append(len(step.chunks[0].fresh))
    assert fresh == [2, 0, 1]


def test_a_sequence_that_never_fits_is_refused() -> None:
    scheduler = Scheduler(BlockPool(5, 4), 8, 2)
    scheduler.add(1, 3, 16)
    with pytest.raises(ValueError, match="never fit"):
        scheduler.add(2, 3, 17)


def test_the_pool_gives_all_blocks_or_none_and_never_block_zero() -> None:
    pool = BlockPool(4, 16)
    with pytest.raises(OutOfBlocks):
        pool.take(4)
    assert ZERO_BLOCK not in pool.take(3)


def test_a_block_given_back_twice_is_an_error() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(KeyError):
        pool.give_back(blocks)


@dataclass(frozen=True)
class _Arrival:
    step: int
    prompt: int
    answer: int
    leaves_after: int | None


_arrivals = st.lists(
    st.builds(
        _Arrival,
        st.integers(0, 12),
        st.integers(1, 30),
        st.integers(1, 10),
        st.none() | st.integers(0, 8),
    ),
    min_size=1,
    max_size=10,
)


class _Model:
    """Follows a scheduler with the truth about each sequence and checks every step."""

    def __init__(self, pool: BlockPool, budget: int, max_running: int) -> None:
        self.pool = pool
        self.budget = budget
        self.scheduler = Scheduler(pool, budget, max_running)
        self.length: dict[int, int] = {}
        self.goal: dict[int, int] = {}
        self.held: dict[int, int] = {}

    def add(self, key: int, arrival: _Arrival) -> None:
        self.length[key], self.goal[key] = arrival.prompt, arrival.prompt + arrival.answer
        self.held[key] = 0
        self.scheduler.add(key, arrival.prompt, self.goal[key])

    def leave(self, key: int) -> None:
        self.scheduler.remove(key)
        self.length.pop(key, None)

    def step(self) -> None:
        step = self.scheduler.plan()
        assert step.chunks or not self.length
        assert step.token_count <= self.budget
        self._check_blocks(step)
        for chunk in step.chunks:
            # Either it goes on where it was or it lost everything.
            assert chunk.start in (0, self.held[chunk.key])
            self.held[chunk.key] = chunk.end
            assert chunk.samples == (chunk.end == self.length[chunk.key])
        self.scheduler.commit(step)
        for chunk in step.chunks:
            self.length[chunk.key] += chunk.samples
            if self.length[chunk.key] == self.goal[chunk.key]:
                self.leave(chunk.key)

    def _check_blocks(self, step: Step) -> None:
        keys = [chunk.key for chunk in step.chunks]
        blocks = [block for chunk in step.chunks for block in chunk.blocks]
        assert len(set(keys)) == len(keys)
        assert len(set(blocks)) == len(blocks) <= self.pool.used_count
        assert ZERO_BLOCK not in blocks
        for chunk in step.chunks:
            assert chunk.end <= len(chunk.blocks) * self.pool.block_size


@settings(max_examples=150, deadline=None)
@given(
    arrivals=_arrivals,
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 10),
    max_running=st.integers(1, 4),
    spare_budget=st.integers(0, 9),
)
def test_all_sequences_end_and_no_block_is_shared_or_lost(
    arrivals: list[_Arrival],
    block_size: int,
    spare_blocks: int,
    max_running: int,
    spare_budget: int,
) -> None:
    longest = max(arrival.prompt + arrival.answer for arrival in arrivals)
    pool = BlockPool(1 + -(-longest // block_size) + spare_blocks, block_size)
    model = _Model(pool, max_running + spare_budget, max_running)
    work = sum(arrival.prompt + arrival.answer for arrival in arrivals)
    now = 0
    while now < 13 or model.length:
        for key, arrival in enumerate(arrivals):
            if arrival.step == now:
                model.add(key, arrival)
            if arrival.leaves_after is not None and now == arrival.step + arrival.leaves_after:
                model.leave(key)
        model.step()
        now += 1
        assert now < 30 + 20 * work, "no end in sight"
    assert pool.used_count == 0
    assert (model.scheduler.running_count, model.scheduler.waiting_count) == (0, 0)
