"""Which blocks of keys and values are free. Integers only; the runner holds the tensors."""

ZERO_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """Blocks 1 to `block_count - 1`. Block 0 is never given out: it stays zero and pads reads."""

    def __init__(self, block_count: int, block_size: int) -> None:
        if block_count < 2:
            raise ValueError(f"{block_count} blocks of keys and values are too few; raise kv_bytes")
        self.block_size = block_size
        self.total = block_count - 1
        # A stack: what was freed last is used first, so memory is touched as late as possible.
        self._free = list(range(block_count - 1, ZERO_BLOCK, -1))
        self._used: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks, all or none."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Frees blocks that were taken; a block given back twice is a bug and raises."""
        for block in blocks:
            self._used.remove(block)
            self._free.append(block)
