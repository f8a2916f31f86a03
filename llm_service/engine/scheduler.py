"""What the next step computes. Pure policy over integers and queues.

A sequence is some tokens, of which the keys and values of the first `computed` are held. Every
kind of work is the same: compute tokens that are not yet computed. Whoever has all but the last
is decoding. What a sequence may rely on:

- First come, first served: places go in the order of arrival, and nobody overtakes a prompt that
  waits for blocks, however small.
- All come to their end. A sequence takes blocks only from younger ones and, where it gets none,
  waits: the oldest always goes on, and it fits alone.
- None takes turns with another for ever. Who lost its blocks comes back at the head of the queue,
  and only where there is room for all its tokens. An older one took of that room, so one must have
  ended meanwhile, unless others hold blocks of equal content that it now shares. Without such, a
  sequence is preempted at most once for each older one, so fewer than `max_running` times; in any
  case, each time is paid for by a block that an older one grew by.
- An answer that has its blocks gets a token in every step, and prompts get what the budget leaves
  or, where answers run, what `limits` allow, so that the answers' steps stay short.
  The oldest of them gets at least half of that, and that is at least one token: no more than
  `max_running` sequences share a step, whatever waits, and the budget is at least that. As one
  token is poor progress beside many answers, let the budget be several times `max_running`.
  Where prompts may not be cut, that bounds their mean share of the steps instead.
- Younger prompts that end within the other half go ahead. So a short question does not wait for
  the pictures of a long one, which takes at most twice as many steps for it.

A full block is never written again. So sequences that begin alike share their beginning: on
admission a sequence finds the blocks that are already there and computes the rest, always its
last token. Of two that come in the same step each computes its own.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from llm_service.engine.block_keys import BlockKeys
from llm_service.engine.block_pool import BlockPool
from llm_service.engine.pricing import StepLimits

# Tokens of an answer over which its pace is taken.
_PACED_TOKENS: Final = 16


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


@dataclass(eq=False)
class _Entry:
    """A sequence.

    Attributes:
        keyed: blocks at its beginning that were found or registered.
        cached: tokens found when it was first admitted; None before.
        pace: mean seconds a token that the steps of its first tokens stood for.
        paced: how many such there were yet.
    """

    key: int
    length: int
    keys: BlockKeys | None
    computed: int = 0
    keyed: int = 0
    cached: int | None = None
    pace: float = 0.0
    paced: int = 0
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
    """Decode first, then prompts in chunks under the token budget, first come first served.

    Attributes:
        preempted_total: times that a sequence lost its blocks to an older one.
        queried_tokens_total: tokens of sequences with keys, counted when first admitted.
        found_tokens_total: those of them that were found and not computed.
    """

    def __init__(
        self,
        pool: BlockPool,
        step_token_budget: int,
        max_running: int,
        *,
        limits: StepLimits | None = None,
        whole_prompts: bool = False,
    ) -> None:
        """Args:
        limits: on the prompt tokens that share a step with answers; None leaves it to the budget.
        whole_prompts: cut no prompt. The oldest goes whatever its length, and others beside it
            where they fit; a long one holds up the answers of one step, and then no prompt goes
            until they had as many steps as if it had been cut.
        """
        self._pool = pool
        self._budget = step_token_budget
        self._limits = limits
        self._max_running = max_running
        self._whole_prompts = whole_prompts
        self._owed = 0  # prompt tokens computed before their time
        self._entries: dict[int, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []  # oldest first
        self.preempted_total = 0
        self.queried_tokens_total = 0
        self.found_tokens_total = 0

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def running_keys(self) -> frozenset[int]:
        """Sequences that have blocks."""
        return frozenset(entry.key for entry in self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that can run alone."""
        return self._pool.total * self._pool.block_size

    def add(self, key: int, length: int, longest: int, keys: BlockKeys | None = None) -> None:
        """Queues a sequence of `length` tokens that may grow to `longest`.

        Args:
            keys: of its blocks; without them it shares none.
        """
        if longest > self.capacity:
            raise ValueError(f"{longest} tokens never fit {self.capacity}")
        entry = self._entries[key] = _Entry(key, length, keys)
        self._waiting.append(entry)

    def cached(self, key: int) -> int:
        """Tokens of a sequence that were found and not computed when it was first admitted."""
        return self._entries[key].cached or 0

    def plan(self) -> Step:
        """The next step; empty only where there are no sequences."""
        self._admit()
        chunks = tuple(self._chunks())
        if not chunks and self._owed:
            # The answers that the prompts wait for are themselves short of blocks.
            self._owed = 0
            chunks = tuple(self._chunks())
        if not chunks and self._entries:
            raise NoProgress
        return Step(chunks)

    def commit(self, step: Step) -> None:
        """Takes note that `step` was computed and each sampling sequence grew by a token."""
        self._take_pace(step)
        for chunk in step.chunks:
            entry = self._entries[chunk.key]
            entry.computed += chunk.length
            entry.length += chunk.samples
            self._register(entry)

    def _take_pace(self, step: Step) -> None:
        if self._limits is None:
            return
        answering = [self._entries[chunk.key] for chunk in step.chunks]
        answering = [entry for entry in answering if entry.decoding]
        now = self._limits.pace(len(answering), step.token_count - len(answering))
        for entry in answering:
            if entry.paced < _PACED_TOKENS:
                entry.paced += 1
                entry.pace += (now - entry.pace) / entry.paced

    def remove(self, key: int, *, spoiled: bool = False) -> None:
        """Forgets a sequence and frees its blocks, wherever it stands; unknown keys are fine.

        Args:
            spoiled: its computation failed, so its blocks are never found again.
        """
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        queue = self._running if entry in self._running else self._waiting
        queue.remove(entry)
        if spoiled:
            self._pool.forget(entry.blocks)
        self._release(entry)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            entry = self._waiting[0]
            found = self._found(entry)
            wanted = self._pool.blocks_for(entry.length) - len(found)
            # A block to grow for each that runs, or the newcomer would soon be preempted.
            spare = self._pool.free_count - self._pool.idle_among(found) - len(self._running)
            if wanted > spare:
                return
            self._pool.share(found)
            self._begin_at(entry, found)
            self._grow(entry, wanted)
            self._running.append(self._waiting.popleft())

    def _found(self, entry: _Entry) -> list[int]:
        """The longest run of blocks that are there already; never the last token's."""
        found: list[int] = []
        if entry.keys is not None:
            for index in range((entry.length - 1) // self._pool.block_size):
                key = entry.keys.key(index)
                block = None if key is None else self._pool.find(key)
                if block is None:
                    break
                found.append(block)
        return found

    def _begin_at(self, entry: _Entry, found: list[int]) -> None:
        entry.blocks = found
        entry.keyed = len(found)
        entry.computed = len(found) * self._pool.block_size
        if entry.cached is None:
            entry.cached = entry.computed
            self.found_tokens_total += entry.computed
            self.queried_tokens_total += entry.length if entry.keys else 0

    def _register(self, entry: _Entry) -> None:
        full = entry.computed // self._pool.block_size
        while entry.keys is not None and entry.keyed < full:
            key = entry.keys.key(entry.keyed)
            if key is not None:
                self._pool.register(entry.blocks[entry.keyed], key)
            entry.keyed += 1

    def _chunks(self) -> Iterator[Chunk]:
        shares = self._shares()
        # By index: reserving may shorten the list, but only behind the entry it serves.
        index = 0
        while index < len(self._running):
            entry = self._running[index]
            index += 1
            length = shares.get(entry.key, 1)
            if length and self._reserve(entry, entry.computed + length):
                yield _chunk(entry, length)

    def _shares(self) -> dict[int, int]:
        """How many tokens of each unfinished prompt the step computes."""
        prompts = [entry for entry in self._running if not entry.decoding]
        left = self._prompt_tokens(len(self._running) - len(prompts))
        if self._whole_prompts:
            return self._whole_shares(prompts, left)
        shares: dict[int, int] = {}
        ahead = left // 2
        for entry in prompts[1:]:
            if entry.remaining <= ahead:
                shares[entry.key] = entry.remaining
                ahead -= entry.remaining
        left -= sum(shares.values())
        for entry in prompts:
            if entry.key not in shares:
                shares[entry.key] = min(entry.remaining, left)
                left -= shares[entry.key]
        return shares

    def _whole_shares(self, prompts: list[_Entry], left: int) -> dict[int, int]:
        """All of a prompt or nothing. What one takes beyond its due, the next ones wait for."""
        answers = len(self._running) - len(prompts)
        self._owed = max(self._owed - left, 0) if answers else 0
        if self._owed:
            return {entry.key: 0 for entry in prompts}
        shares: dict[int, int] = {}
        for number, entry in enumerate(prompts):
            shares[entry.key] = entry.remaining if number == 0 or entry.remaining <= left else 0
            left -= shares[entry.key]
        self._owed = max(-left, 0)
        return shares

    def _prompt_tokens(self, answers: int) -> int:
        """How many tokens of prompts may share a step with so many answers."""
        left = self._budget - answers
        if not answers or self._limits is None:
            return left
        paces = [entry.pace for entry in self._running if entry.decoding and entry.paced]
        return min(left, self._limits.prompt_tokens_beside(answers, min(paces, default=None)))

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
        entry.computed = entry.keyed = 0


def _chunk(entry: _Entry, length: int) -> Chunk:
    fresh, entry.fresh = tuple(entry.fresh), []
    samples = length == entry.remaining
    return Chunk(entry.key, entry.computed, length, samples, tuple(entry.blocks), fresh)
