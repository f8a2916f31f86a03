"""Names a sequence's full blocks by all that their keys and values depend on.

The key of a block is a digest of the key before it, its token ids and, where tokens stand elsewhere
than at their index, where they stand. Where an image lies over it, there are the image's digest,
the first of its rows in the block and where that row stands. The first key follows from the
prompt's salt. So equal keys mean equal histories from the first token on, in equal places, under
equal salts; every field is framed by its length, so none runs into the next.
"""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

_KEY_BYTES = 32
_FIELD = struct.Struct("<Q")
_PLACE = struct.Struct("<QQQ")


class Span(Protocol):
    """The placeholder tokens `start` to `start + length` of a prompt, and what they stand for."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def digest(self) -> bytes: ...


class BlockKeys:
    """Keys of one sequence's blocks, each made when it is first asked for and once.

    Args:
        token_ids: prompt and answer; read as it grows, and what it holds must not change.
        images: apart and in order. One without a digest may be anything, so no block from it on
            has a key.
        salt: sequences of other salts have no key in common.
        placed: names where the tokens from one index to another stand; empty where each stands at
            its index.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        images: Sequence[Span],
        salt: bytes,
        block_size: int,
        placed: Callable[[int, int], bytes] = lambda first, last: b"",
    ) -> None:
        self._token_ids = token_ids
        self._images = images
        self._block_size = block_size
        self._placed = placed
        self._next_image = 0
        self._last = _digest(_FIELD.pack(block_size), _framed(salt))
        self._keys: list[bytes] = []
        unknown = (image.start for image in images if not image.digest)
        self._shareable = next(unknown, None)

    def key(self, index: int) -> bytes | None:
        """The 32 bytes that name block `index`, or None where it may be shared with nobody.

        Raises:
            IndexError: the sequence does not fill that block yet.
        """
        end = (index + 1) * self._block_size
        if end > len(self._token_ids):
            raise IndexError(f"block {index} ends at token {end} of {len(self._token_ids)}")
        if self._shareable is not None and end > self._shareable:
            return None
        while len(self._keys) <= index:
            self._last = self._following()
            self._keys.append(self._last)
        return self._keys[index]

    def _following(self) -> bytes:
        begin = len(self._keys) * self._block_size
        end = begin + self._block_size
        tokens = array("q", self._token_ids[begin:end]).tobytes()
        places = _framed(self._placed(begin, end))
        return _digest(self._last, _framed(tokens), places, *self._overlapping(begin, end))

    def _overlapping(self, begin: int, end: int) -> Iterator[bytes]:
        while self._next_image < len(self._images):
            image = self._images[self._next_image]
            first, last = max(begin, image.start), min(end, image.start + image.length)
            if first < last:
                yield _framed(image.digest)
                yield _PLACE.pack(first - image.start, first - begin, last - first)
            if image.start + image.length > end:
                return
            self._next_image += 1


def _framed(field: bytes) -> bytes:
    return _FIELD.pack(len(field)) + field


def _digest(*fields: bytes) -> bytes:
    return blake2b(b"".join(fields), digest_size=_KEY_BYTES).digest()
