"""Which encoder to ask for a picture. Pure: loads and a digest in, an order out.

A picture's digest ranks all encoders (rendezvous hashing: Thaler and Ravishankar, "Using name-based
mappings to increase hit rates", 1998): the same picture has the same ranks everywhere, and an
encoder that comes or goes moves only its own share. Of the first two ranks the one with the fewer
outstanding rows is asked ("power of two choices": Mitzenmacher, 2001), so that a repeat finds the
cache of one of two encoders, and neither is asked blindly. Where both are crowded, as the encoders
of a picture that everybody sends may be, the next rank is asked that is not.
`python -m benchmarks.placement` compares it with other policies; docs/fleet.md has the table.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# An encoder is crowded with more than so many times the mean of outstanding rows: beyond what
# chance does among a few, so that no small fleet gives up a cache for it.
CROWDED = 4


@dataclass(frozen=True)
class Seat:
    """An encoder that may be asked: its address, and the rows asked of it and not answered yet."""

    name: str
    outstanding: int


def order(seats: Sequence[Seat], digest: bytes) -> list[int]:
    """Indices of all `seats`: whom to ask first, then whom after a failure.

    Args:
        seats: in any order; it does not matter.
        digest: names the picture, at least 8 bytes.
    """
    ranked = ranks([seat.name for seat in seats], digest)
    if ranked:
        ranked.insert(0, ranked.pop(choice(ranked, [seat.outstanding for seat in seats])))
    return ranked


def choice(ranked: Sequence[int], outstanding: Sequence[int]) -> int:
    """The place in `ranked`, not empty, of the encoder to ask; `outstanding` is that of all."""
    fewer = int(len(ranked) > 1 and outstanding[ranked[1]] < outstanding[ranked[0]])
    most = CROWDED * sum(outstanding) / len(outstanding)
    if outstanding[ranked[fewer]] <= most:
        return fewer
    free = (place for place, at in enumerate(ranked) if outstanding[at] <= most)
    return next(free, fewer)


def ranks(names: Sequence[str], digest: bytes) -> list[int]:
    """Indices of `names` by their rank for a digest; equal names by index."""
    mixed = _mixed(_hashes(tuple(names)) ^ np.uint64(int.from_bytes(digest[:8], "little")))
    return np.argsort(mixed, kind="stable").tolist()  # type: ignore[no-any-return]


# The whole fleet, time and again, and some parts of it, of which others were tried.
@lru_cache(maxsize=32)
def _hashes(names: tuple[str, ...]) -> NDArray[np.uint64]:
    return np.array([_hash_of(name) for name in names], np.uint64)


@lru_cache(maxsize=65536)
def _hash_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: 2014): every bit depends on every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
