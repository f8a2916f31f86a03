"""Which encoder to ask for a picture. Pure: loads and a digest in, an order out.

A picture's digest ranks all encoders (rendezvous hashing: Thaler and Ravishankar, "Using name-based
mappings to increase hit rates", 1998): the same picture has the same ranks everywhere, and an
encoder that comes or goes moves only its own share. Of the first two ranks the one with the fewer
outstanding rows is asked ("power of two choices": Mitzenmacher, 2001), so that a repeat finds the
cache of one of two encoders, and neither is asked blindly. `python -m benchmarks.placement`
compares it with other policies; docs/fleet.md has the table.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


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
    if len(ranked) > 1 and seats[ranked[1]].outstanding < seats[ranked[0]].outstanding:
        ranked[:2] = ranked[1], ranked[0]
    return ranked


def ranks(names: Sequence[str], digest: bytes) -> list[int]:
    """Indices of `names` by their rank for a digest; equal names by index."""
    hashes = np.fromiter((_hash_of(name) for name in names), np.uint64, len(names))
    mixed = _mixed(hashes ^ np.uint64(int.from_bytes(digest[:8], "little")))
    return np.argsort(mixed, kind="stable").tolist()  # type: ignore[no-any-return]


@lru_cache(maxsize=65536)
def _hash_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: 2014): every bit depends on every other."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
