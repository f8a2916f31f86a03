"""The scheduler's promises, on integers alone."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.block_keys import BlockKeys
from llm_service.engine.block_pool import ZERO_BLOCK, BlockPool
from llm_service.engine.pricing import StepLimits, StepPrices
from llm_service.engine.scheduler import Chunk, Scheduler, Step


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


def test_a_newcomer_waits_for_a_block_of_growth_for_each_that_runs() -> None:
    scheduler = Scheduler(BlockPool(5, 4), step_token_budget=64, max_running=4)
    scheduler.add(1, 4, 8)
    scheduler.add(2, 9, 12)
    assert _next(scheduler) == [(1, 0, 4, True)]
    scheduler.remove(2)
    scheduler.add(3, 8, 12)
    assert _next(scheduler) == [(1, 4, 1, True), (3, 0, 8, True)]


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


def _shared(tokens: int) -> BlockKeys:
    return BlockKeys(list(range(tokens)), (), b"", 4)


def test_a_prompt_begins_behind_the_blocks_that_another_left() -> None:
    pool = BlockPool(20, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=4)
    scheduler.add(1, 11, 20, _shared(20))
    assert _next(scheduler) == [(1, 0, 11, True)]
    scheduler.remove(1)
    assert (pool.used_count, pool.cached_count) == (0, 2)
    scheduler.add(2, 14, 20, _shared(20))
    step = scheduler.plan()
    assert _chunks(step) == [(2, 8, 6, True)]
    assert len(step.chunks[0].fresh) == 2
    assert not {*step.chunks[0].fresh} & {*step.chunks[0].blocks[:2]}
    assert scheduler.cached(2) == 8
    assert (scheduler.found_tokens_total, scheduler.queried_tokens_total) == (8, 25)


def test_an_answers_blocks_are_found_by_the_next_turn() -> None:
    scheduler = Scheduler(BlockPool(20, 4), step_token_budget=64, max_running=4)
    scheduler.add(1, 6, 20, _shared(20))
    for _ in range(7):
        _next(scheduler)
    scheduler.remove(1)
    scheduler.add(2, 16, 20, _shared(20))
    assert _next(scheduler) == [(2, 12, 4, True)]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    scheduler = Scheduler(BlockPool(20, 4), step_token_budget=64, max_running=4)
    scheduler.add(1, 8, 20, _shared(20))
    _next(scheduler)
    scheduler.add(2, 8, 20, _shared(20))
    assert _next(scheduler) == [(1, 8, 1, True), (2, 4, 4, True)]


def test_blocks_in_use_are_shared_so_more_sequences_fit() -> None:
    pool = BlockPool(7, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=8)
    scheduler.add(1, 13, 14, _shared(20))
    _next(scheduler)
    scheduler.add(2, 13, 14, _shared(20))
    _, second = scheduler.plan().chunks
    assert (second.start, len(second.fresh), pool.used_count) == (12, 1, 5)


def test_two_equal_prompts_of_one_step_each_compute_their_own() -> None:
    pool = BlockPool(20, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=4)
    for key in (1, 2):
        scheduler.add(key, 9, 20, _shared(20))
    assert _next(scheduler) == [(1, 0, 9, True), (2, 0, 9, True)]
    for key in (1, 2):
        scheduler.remove(key)
    assert (pool.used_count, pool.cached_count) == (0, 2)


def test_who_lost_its_blocks_finds_those_that_nobody_took() -> None:
    scheduler = Scheduler(BlockPool(7, 4), step_token_budget=64, max_running=4)
    scheduler.add(1, 8, 24, BlockKeys(list(range(24)), (), b"old", 4))
    scheduler.add(2, 12, 24, BlockKeys(list(range(24)), (), b"young", 4))
    _next(scheduler)
    while scheduler.running_count == 2:
        last = _next(scheduler)
    assert scheduler.preempted_total == 1
    scheduler.remove(last[0][0])
    (again,) = scheduler.plan().chunks
    assert (again.key, again.start) == (2, 8)
    assert scheduler.cached(2) == 0


def test_what_a_failed_sequence_computed_is_not_found_by_others() -> None:
    pool = BlockPool(20, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=4)
    scheduler.add(1, 9, 20, _shared(20))
    _next(scheduler)
    scheduler.remove(1, spoiled=True)
    assert (pool.used_count, pool.cached_count) == (0, 0)
    scheduler.add(2, 9, 20, _shared(20))
    assert _next(scheduler) == [(2, 0, 9, True)]


def test_short_prompts_pass_a_long_one_that_still_gets_half_of_every_step() -> None:
    scheduler = Scheduler(BlockPool(999, 4), step_token_budget=64, max_running=32)
    scheduler.add(0, 1000, 1001)
    for key in range(1, 21):
        scheduler.add(key, 10, 11)
    steps, short_done_after = 0, 0
    while scheduler.running_count or not steps:
        steps += 1
        for key, start, length, samples in _next(scheduler):
            assert key or length >= min(32, 1000 - start)
            if samples:
                scheduler.remove(key)
                short_done_after = steps if key else short_done_after
    # Three short prompts fit in half a step; alone the long one takes 16 steps.
    assert short_done_after == 7
    assert steps <= 32


def test_prompts_too_long_to_pass_go_in_order_of_arrival() -> None:
    scheduler = Scheduler(BlockPool(99, 4), step_token_budget=64, max_running=4)
    for key in (1, 2, 3):
        scheduler.add(key, 60, 61)
    assert _next(scheduler) == [(1, 0, 60, True), (2, 0, 4, False)]
    assert _next(scheduler) == [(1, 60, 1, True), (2, 4, 56, True), (3, 0, 7, False)]


def test_small_prompts_that_keep_coming_do_not_starve_a_large_one() -> None:
    scheduler = Scheduler(BlockPool(11, 4), step_token_budget=16, max_running=4)
    ends: dict[int, int] = {}
    for now in range(60):
        scheduler.add(now, 36 if now == 3 else 4, 40 if now == 3 else 6)
        for key, _, _, samples in _next(scheduler):
            ends[key] = ends.get(key, 0) + samples
            if ends[key] == (4 if key == 3 else 2):
                scheduler.remove(key)
    # It starts when those before it have ended and takes six steps for prompt and answer.
    assert ends[3] == 4
    assert max(key for key, count in ends.items() if count == 2) > 20


@dataclass(frozen=True)
class _Arrival:
    """A request of the property test; how its tokens come about says `_Truth`."""

    step: int
    prompt: int
    answer: int
    family: int
    own_from: int
    follows: bool
    image: tuple[int, int, bytes] | None
    salt: bytes
    leaves_after: int | None
    fails_after: int | None


_images = st.tuples(st.integers(0, 12), st.integers(1, 12), st.sampled_from([b"", b"x", b"y"]))
_arrivals = st.lists(
    st.builds(
        _Arrival,
        step=st.integers(0, 12),
        prompt=st.integers(1, 30),
        answer=st.integers(1, 10),
        family=st.integers(0, 1),
        own_from=st.integers(0, 30),
        follows=st.booleans(),
        image=st.none() | _images,
        salt=st.sampled_from([b"", b"t"]),
        leaves_after=st.none() | st.integers(0, 8),
        fails_after=st.none() | st.integers(1, 12),
    ),
    min_size=1,
    max_size=10,
)


@dataclass(frozen=True)
class _Image:
    start: int
    length: int
    digest: bytes


class _Truth:
    """What a sequence's tokens are, and for each the whole history that its keys depend on."""

    def __init__(self, name: int, arrival: _Arrival, tokens: list[int], answer: int) -> None:
        self.name = name
        self.salt = arrival.salt
        self.tokens = tokens
        self.goal = len(tokens) + answer
        self.images = _fitting(arrival.image, len(tokens))
        self.history: list[int] = []
        self._follow()

    def grow(self) -> None:
        """A token that follows from the history, as a greedy model's does."""
        self.tokens.append(self.history[-1] % 2)
        self._follow()

    def _follow(self) -> None:
        for place in range(len(self.history), len(self.tokens)):
            # Of integers only: hashes of bytes differ from one process to the next.
            before = self.history[-1] if place else hash((_number(self.salt),))
            self.history.append(hash((before, self.tokens[place], *self._row(place))))

    def _row(self, place: int) -> tuple[int, int]:
        for image in self.images:
            if 0 <= place - image.start < image.length:
                # Pictures of no known content all differ.
                return _number(image.digest) or 1000 + self.name, place - image.start
        return 0, 0


def _number(field: bytes) -> int:
    return int.from_bytes(field, "big")


def _fitting(image: tuple[int, int, bytes] | None, length: int) -> tuple[_Image, ...]:
    return (_Image(*image),) if image and image[0] + image[1] <= length else ()


_prices = st.builds(StepPrices, st.floats(0, 20), st.floats(0.01, 2))


class _Model:
    """Runs a scheduler over a memory that holds histories in place of keys and values.

    Every sequence must read exactly its own history, whoever wrote it.
    """

    def __init__(
        self,
        pool: BlockPool,
        budget: int,
        max_running: int,
        cache: bool,
        limits: StepLimits | None,
    ) -> None:
        self.pool = pool
        self.budget = budget
        self.cache = cache
        self.limits = limits
        self.scheduler = Scheduler(pool, budget, max_running, limits=limits)
        self.truths: dict[int, _Truth] = {}
        self.memory: dict[int, int] = {}
        self.last_tokens: list[int] = []
        self.now = 0

    def add(self, key: int, arrival: _Arrival) -> None:
        longest = min(arrival.prompt + arrival.answer, self.scheduler.capacity)
        said = self.last_tokens if arrival.follows else []
        numbers = [arrival.family] * arrival.own_from + [key % 3] * arrival.prompt
        tokens = (said + numbers)[: longest - arrival.answer]
        truth = self.truths[key] = _Truth(key, arrival, tokens, arrival.answer)
        keys = BlockKeys(truth.tokens, truth.images, truth.salt, self.pool.block_size)
        self.scheduler.add(key, len(tokens), truth.goal, keys if self.cache else None)

    def leave(self, key: int, spoiled: bool = False) -> None:
        self.scheduler.remove(key, spoiled=spoiled)
        if truth := self.truths.pop(key, None):
            self.last_tokens = truth.tokens

    def step(self, failing: set[int]) -> None:
        step = self.scheduler.plan()
        self._check_plan(step)
        self._compute(step, failing)
        self.scheduler.commit(step)
        for chunk in step.chunks:
            self._advance(chunk, chunk.key in failing)
        self.now += 1

    def _advance(self, chunk: Chunk, failed: bool) -> None:
        truth = self.truths[chunk.key]
        if failed:
            return self.leave(chunk.key, spoiled=True)
        if chunk.samples:
            truth.grow()
            if len(truth.tokens) == truth.goal:
                self.leave(chunk.key)
        return None

    def _check_plan(self, step: Step) -> None:
        assert step.token_count <= self.budget
        names = [chunk.key for chunk in step.chunks]
        assert names == sorted(set(names))
        # The oldest always goes on; where nothing else limits it, by half of what answers leave.
        assert names[:1] == sorted(self.truths)[:1]
        for chunk in step.chunks[:1]:
            answers = sum(other.length == 1 for other in step.chunks[1:])
            rest = len(self.truths[chunk.key].tokens) - chunk.start
            share = 1 if self.limits else (self.budget - answers) // 2
            assert chunk.length >= min(rest, share)
        for chunk in step.chunks:
            assert chunk.samples == (chunk.end == len(self.truths[chunk.key].tokens))
            assert chunk.end <= len(chunk.blocks) * self.pool.block_size
            assert len(set(chunk.blocks)) == len(chunk.blocks)
            assert ZERO_BLOCK not in chunk.blocks
        held = {block for chunk in step.chunks for block in chunk.blocks}
        assert len(held) <= self.pool.used_count
        assert self.pool.used_count + self.pool.free_count == self.pool.total

    def _compute(self, step: Step, failing: set[int]) -> None:
        """As a forward pass does: all are cleared, then all write, then all read."""
        for block in (block for chunk in step.chunks for block in chunk.fresh):
            for slot in range(block * self.pool.block_size, (block + 1) * self.pool.block_size):
                self.memory.pop(slot, None)
        for chunk in step.chunks:
            spoilt = chunk.key in failing
            for place in range(chunk.start, chunk.end):
                history = self.truths[chunk.key].history[place]
                self.memory[self._slot(chunk, place)] = -1 if spoilt else history
        for chunk in step.chunks:
            if chunk.key not in failing:
                read = [self.memory.get(self._slot(chunk, place)) for place in range(chunk.end)]
                assert read == self.truths[chunk.key].history[: chunk.end]

    def _slot(self, chunk: Chunk, place: int) -> int:
        size = self.pool.block_size
        return chunk.blocks[place // size] * size + place % size


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    arrivals=_arrivals,
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 10),
    max_running=st.integers(1, 4),
    spare_budget=st.integers(0, 9),
    cache=st.sampled_from([True, True, True, False]),
    limits=st.none() | st.builds(StepLimits, _prices, st.floats(1.01, 9)),
)
def test_all_end_read_their_own_history_and_leave_no_block(
    arrivals: list[_Arrival],
    block_size: int,
    spare_blocks: int,
    max_running: int,
    spare_budget: int,
    cache: bool,
    limits: StepLimits | None,
) -> None:
    longest = max(arrival.prompt + arrival.answer for arrival in arrivals)
    pool = BlockPool(1 + -(-longest // block_size) + spare_blocks, block_size)
    model = _Model(pool, max_running + spare_budget, max_running, cache, limits)
    arrivals.sort(key=lambda arrival: arrival.step)
    work = 10 * longest * len(arrivals)
    while model.now < 13 or model.truths:
        failing = set()
        for key, arrival in enumerate(arrivals):
            if arrival.step == model.now:
                model.add(key, arrival)
            if (
                arrival.leaves_after is not None
                and model.now == arrival.step + arrival.leaves_after
            ):
                model.leave(key)
            if arrival.fails_after is not None and model.now >= arrival.step + arrival.fails_after:
                failing.add(key)
        model.step(failing)
        assert model.now < 13 + work, "no end in sight"
    assert (model.scheduler.running_count, model.scheduler.waiting_count) == (0, 0)
    assert pool.used_count == 0
    assert sorted(pool.take(pool.total)) == list(range(1, pool.total + 1))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=2, max_size=8),
    spare_blocks=st.integers(0, 6),
    max_running=st.integers(2, 5),
)
def test_none_loses_its_blocks_more_often_than_there_are_older_ones(
    sizes: list[tuple[int, int]], spare_blocks: int, max_running: int
) -> None:
    total = max(-(-(prompt + answer) // 2) for prompt, answer in sizes) + spare_blocks
    scheduler = Scheduler(BlockPool(1 + total, 2), 2 * max_running, max_running)
    left = {}
    for key, (prompt, answer) in enumerate(sizes):
        keys = BlockKeys(list(range(prompt + answer)), (), bytes([key]), 2)
        scheduler.add(key, prompt, prompt + answer, keys)
        left[key] = answer
    while left:
        for key, _, _, samples in _next(scheduler):
            left[key] -= samples
            if left[key] == 0:
                scheduler.remove(key)
                del left[key]
    assert scheduler.preempted_total <= sum(min(key, max_running - 1) for key in range(len(sizes)))


# Every token costs the same: answers of n may have n tokens of prompts beside them.
EVEN = StepLimits(StepPrices(fixed=0, each=1), stretch=2)


def test_beside_answers_a_prompt_takes_no_more_than_it_may_and_alone_the_whole_budget() -> None:
    pool = BlockPool(99, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=8, limits=EVEN)
    scheduler.add(1, length=100, longest=110)
    assert _next(scheduler) == [(1, 0, 64, False)]
    assert _next(scheduler) == [(1, 64, 36, True)]
    scheduler.add(2, length=30, longest=40)
    scheduler.add(3, length=3, longest=9)
    assert _next(scheduler) == [(1, 100, 1, True), (2, 0, 1, False)]


def test_prompts_beside_an_answer_that_began_in_calm_never_get_more() -> None:
    pool = BlockPool(99, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=8, limits=EVEN)
    scheduler.add(1, length=4, longest=90)
    for _ in range(17):  # the prompt, and all the tokens by which the pace is taken
        _next(scheduler)
    scheduler.add(2, length=40, longest=90)
    for number in range(30):
        assert _next(scheduler) == [(1, 20 + number, 1, True), (2, number, 1, False)]


def test_prompts_beside_answers_that_began_among_prompts_get_more() -> None:
    pool = BlockPool(99, 4)
    scheduler = Scheduler(pool, step_token_budget=64, max_running=8, limits=EVEN)
    scheduler.add(1, length=4, longest=90)
    scheduler.add(2, length=200, longest=220)
    assert _next(scheduler) == [(1, 0, 4, True), (2, 0, 60, False)]
    # Where nothing is known of its pace, as beside one in calm; then by what it got.
    assert _next(scheduler) == [(1, 4, 1, True), (2, 60, 1, False)]
    assert _next(scheduler) == [(1, 5, 1, True), (2, 61, 3, False)]
    # The pace is the mean of steps worth 2, and 3 of 4.
    assert _next(scheduler) == [(1, 6, 1, True), (2, 64, 4, False)]
