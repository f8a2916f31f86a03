"""Which blocks of keys and values are free. Integers and keys only; the runner holds the tensors.

A block is empty, in use by one or more sequences, or idle: in use by none, but under a key by
which a sequence with the same history finds it again until it is evicted to make room.
"""

from collections import OrderedDict
from collections.abc import Sequence

ZERO_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """Blocks 1 to `block_count - 1`. Block 0 is never given out: it stays zero and pads reads.

    Idle blocks count as free. Empty ones are given out before them, then the least recently used.
    """

    def __init__(self, block_count: int, block_size: int) -> None:
        if block_count < 2:
            raise ValueError(f"{block_count} blocks of keys and values are too few; raise kv_bytes")
        self.block_size = block_size
        self.total = block_count - 1
        # A stack: what was freed last is used first, so memory is touched as late as possible.
        self._empty = list(range(block_count - 1, ZERO_BLOCK, -1))
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free_count(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def used_count(self) -> int:
        return len(self._users)

    @property
    def cached_count(self) -> int:
        """Idle blocks."""
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def find(self, key: bytes) -> int | None:
        """The block of that key, in use or idle. It stays where it is: see `share`."""
        return self._block_of.get(key)

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are idle, so would no longer be free if they were shared."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Puts found blocks to one more use each."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1

    def take(self, count: int) -> list[int]:
        """`count` blocks of no defined content for one user, all or none."""
        if count > self.free_count:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free_count} free")
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Ends one use of each of a sequence's blocks, which are given in its order.

        The last is evicted first: a prefix is of use without what follows, and not the reverse.

        Raises:
            KeyError: a block is not in use, which is a bug.
        """
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                del self._users[block]
                self._rest(block)

    def register(self, block: int, key: bytes) -> None:
        """Lets a block in use be found from now on; it must be full and is never written again.

        Where another block has the key already, that one keeps it.
        """
        if block not in self._key_of and self._block_of.setdefault(key, block) == block:
            self._key_of[block] = key

    def forget(self, blocks: Sequence[int]) -> None:
        """Lets none of these be found again; who uses them keeps them."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            if block in self._idle:
                del self._idle[block]
                self._empty.append(block)

    def _rest(self, block: int) -> None:
        if block in self._key_of:
            self._idle[block] = None
        else:
            self._empty.append(block)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
