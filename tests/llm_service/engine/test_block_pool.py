"""Who uses a block, and which content can still be found."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.block_pool import ZERO_BLOCK, BlockPool, OutOfBlocks


def _stored(pool: BlockPool, *keys: bytes) -> list[int]:
    """A sequence that computed blocks of these keys and ended."""
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.give_back(blocks)
    return blocks


def _known(pool: BlockPool, *keys: bytes) -> list[bytes]:
    return [key for key in keys if pool.find(key) is not None]


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


def test_an_ended_sequences_blocks_are_found_and_count_as_free() -> None:
    pool = BlockPool(5, 16)
    blocks = _stored(pool, b"a", b"b")
    assert [pool.find(b"a"), pool.find(b"b")] == blocks
    assert (pool.free_count, pool.used_count, pool.cached_count) == (4, 0, 2)
    pool.share(blocks)
    assert (pool.free_count, pool.used_count, pool.cached_count) == (2, 2, 0)


def test_empty_blocks_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(5, 16)
    _stored(pool, b"old")
    _stored(pool, b"new")
    touched = pool.find(b"old")
    assert touched is not None
    pool.share([touched])
    pool.give_back([touched])
    pool.take(2)
    assert _known(pool, b"old", b"new") == [b"old", b"new"]
    pool.take(1)
    assert _known(pool, b"old", b"new") == [b"old"]


def test_of_one_sequence_the_end_is_evicted_before_the_beginning() -> None:
    pool = BlockPool(4, 16)
    _stored(pool, b"1", b"2", b"3")
    pool.take(1)
    assert _known(pool, b"1", b"2", b"3") == [b"1", b"2"]
    pool.take(1)
    assert _known(pool, b"1", b"2", b"3") == [b"1"]


def test_a_shared_block_stays_until_its_last_user_leaves() -> None:
    pool = BlockPool(3, 16)
    (block,) = pool.take(1)
    pool.register(block, b"a")
    pool.share([block])
    pool.give_back([block])
    assert (pool.used_count, pool.cached_count) == (1, 0)
    with pytest.raises(OutOfBlocks):
        pool.take(2)
    pool.give_back([block])
    assert (pool.used_count, pool.cached_count) == (0, 1)


def test_the_first_block_under_a_key_keeps_it() -> None:
    pool = BlockPool(3, 16)
    first, second = pool.take(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.find(b"a") == first
    pool.give_back([second])
    assert (pool.find(b"a"), pool.cached_count) == (first, 0)


def test_what_is_forgotten_is_found_no_more_but_stays_with_its_users() -> None:
    pool = BlockPool(4, 16)
    idle, used = _stored(pool, b"idle"), pool.take(1)
    pool.register(used[0], b"used")
    pool.forget([*idle, *used, *pool.take(1)])
    assert _known(pool, b"idle", b"used") == []
    assert (pool.used_count, pool.free_count, pool.cached_count) == (2, 1, 0)
    pool.give_back(used)
    assert (pool.free_count, pool.cached_count) == (2, 0)


class _Books:
    """Knows each user's blocks and what lies in them, and checks the pool after every move."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks + 1, 1)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.keys: set[bytes] = set()

    def take(self, number: int) -> None:
        count = number % 4
        if count > self.pool.free_count:
            with pytest.raises(OutOfBlocks):
                self.pool.take(count)
            return
        blocks = self.pool.take(count)
        assert not {*blocks} & {*self._users()}
        for block in blocks:
            self.content.pop(block, None)
        self.held.append(blocks)

    def register(self, number: int) -> None:
        if users := self._users():
            block = sorted(users)[number % len(users)]
            key = self.content.setdefault(block, bytes([number % 6]))
            self.keys.add(key)
            self.pool.register(block, key)

    def share(self, number: int) -> None:
        key = bytes([number % 6])
        block = self.pool.find(key)
        if block is not None:
            assert self.pool.idle_among([block]) == (block not in self._users())
            self.pool.share([block])
            self.held.append([block])

    def leave(self, number: int) -> None:
        if self.held:
            self.pool.give_back(self.held.pop(number % len(self.held)))

    def forget(self, number: int) -> None:
        block = 1 + number % self.pool.total
        self.pool.forget([block])
        for key in self.keys:
            assert self.pool.find(key) != block

    def check(self) -> None:
        used = len(self._users())
        assert (self.pool.used_count, self.pool.free_count) == (used, self.pool.total - used)
        assert 0 <= self.pool.cached_count <= self.pool.free_count
        for key in self.keys:
            block = self.pool.find(key)
            assert block is None or self.content[block] == key

    def _users(self) -> Counter[int]:
        return Counter(block for blocks in self.held for block in blocks)


_MOVES = ["take", "register", "share", "leave", "forget"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.sampled_from(_MOVES), st.integers(0, 100)), min_size=5, max_size=50),
)
def test_uses_are_counted_exactly_and_a_key_leads_to_its_content(
    blocks: int, moves: list[tuple[str, int]]
) -> None:
    books = _Books(blocks)
    for move, number in moves:
        getattr(books, move)(number)
        books.check()
    while books.held:
        books.leave(0)
    assert sorted(books.pool.take(blocks)) == list(range(1, blocks + 1))
