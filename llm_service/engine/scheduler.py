"""What the next step computes. Pure policy over integers and queues.

A sequence is some tokens, of which the keys and values of the first `computed` are held. Every
kind of work is the same: compute tokens that are not yet computed. Whoever has all but the last
is decoding. A sequence takes blocks only from younger ones and, where it gets none, waits: the
oldest always goes on, and it fits alone, so all come to their end.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from llm_service.engine.block_pool import BlockPool


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + length` of one sequence.

    Attributes:
        samples: whether the last of them predicts a new token.
        blocks: the sequence's blocks in order, this chunk's included.
        fresh: those of them taken since the last step, whose content is another's.
    """

    key: int
    start: int
    length: int
    samples: bool
    blocks: tuple[int, ...]
    fresh: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Step:
    """One forward pass: at most one chunk a sequence, oldest sequence first."""

    chunks: tuple[Chunk, ...]

    @property
    def token_count(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def apart(self) -> Iterator["Step"]:
        """The same work, one sequence a step."""
        return (Step((chunk,)) for chunk in self.chunks)


@dataclass
class _Entry:
    key: int
    length: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        return self.remaining == 1


class NoProgress(Exception):
    """There are sequences but nothing can be computed: a bug here, never a caller's fault."""


class Scheduler:
    """Decode first, then prompts in chunks under the token budget, first come first served."""

    def __init__(self, pool: BlockPool, step_token_budget: int, max_running: int) -> None:
        self._pool = pool
        self._budget = step_token_budget
        self._max_running = max_running
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []  # oldest first
        self.preempted_total = 0

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that can run alone."""
        return self._pool.total * self._pool.block_size

    def add(self, key: int, length: int, longest: int) -> None:
        """Queues a sequence of `length` tokens that may grow to `longest`."""
        if longest > self.capacity:
            raise ValueError(f"{longest} tokens never fit {self.capacity}")
        self._waiting.append(_Entry(key, length))

    def plan(self) -> Step:
        """The next step; empty only where there are no sequences."""
        self._admit()
        chunks = tuple(self._chunks())
        if not chunks and (self._running or self._waiting):
            raise NoProgress
        return Step(chunks)

    def commit(self, step: Step) -> None:
        """Takes note that `step` was computed and each sampling sequence grew by a token."""
        entries = {entry.key: entry for entry in self._running}
        for chunk in step.chunks:
            entry = entries[chunk.key]
            entry.computed += chunk.length
            entry.length += chunk.samples

    def remove(self, key: int) -> None:
        """Forgets a sequence and frees its blocks, wherever it stands; unknown keys are fine."""
        for queue in (self._running, self._waiting):
            for entry in [entry for entry in queue if entry.key == key]:
                self._release(entry)
                queue.remove(entry)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            entry = self._waiting[0]
            wanted = self._pool.blocks_for(entry.length)
            # A block to grow for each that runs, or the newcomer would soon be preempted.
            if wanted + len(self._running) > self._pool.free_count:
                return
            self._grow(entry, wanted)
            self._running.append(self._waiting.popleft())

    def _chunks(self) -> Iterator[Chunk]:
        prompt_budget = self._budget - sum(entry.decoding for entry in self._running)
        # By index: reserving may shorten the list, but only behind the entry it serves.
        index = 0
        while index < len(self._running):
            entry = self._running[index]
            index += 1
            decoding = entry.decoding
            length = 1 if decoding else min(entry.remaining, prompt_budget)
            if length == 0 or not self._reserve(entry, entry.computed + length):
                continue
            prompt_budget -= 0 if decoding else length
            yield _chunk(entry, length)

    def _reserve(self, entry: _Entry, tokens: int) -> bool:
        missing = self._pool.blocks_for(tokens) - len(entry.blocks)
        while missing > self._pool.free_count:
            if self._running[-1] is entry:
                return False
            self._preempt_youngest()
        self._grow(entry, max(missing, 0))
        return True

    def _preempt_youngest(self) -> None:
        entry = self._running.pop()
        self._release(entry)
        entry.computed = 0
        self._waiting.appendleft(entry)
        self.preempted_total += 1

    def _grow(self, entry: _Entry, count: int) -> None:
        blocks = self._pool.take(count)
        entry.blocks += blocks
        entry.fresh += blocks

    def _release(self, entry: _Entry) -> None:
        self._pool.give_back(entry.blocks)
        entry.blocks = []
        entry.fresh = []


def _chunk(entry: _Entry, length: int) -> Chunk:
    fresh, entry.fresh = tuple(entry.fresh), []
    samples = length == entry.remaining
    return Chunk(entry.key, entry.computed, length, samples, tuple(entry.blocks), fresh)
