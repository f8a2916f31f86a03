"""Embeddings kept for later requests: what names one, and a store bounded by bytes.

The encoder and the LLM service each keep their own; both name entries by `embedding_key`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple
from typing import Generic, TypeVar

from chiasm.models.contract import PixelOptions
from chiasm.models.identity import EncoderIdentity

V = TypeVar("V")

# Bytes of an entry besides its tensors: key, objects and places in tables.
ENTRY_BYTES = 2048


def embedding_key(
    tenant: str, identity: EncoderIdentity, digest: bytes, byte_count: int, options: PixelOptions
) -> bytes:
    """32 bytes that differ if the picture, its size, its owner, the encoder or an option differs.

    `digest` is the SHA-256 of the picture file and `byte_count` its length. Each field is framed by
    its length, so that no two lists of fields give the same bytes.
    """
    framed = hashlib.sha256()
    for field in (tenant, *astuple(identity), digest, byte_count, *astuple(options)):
        data = field if isinstance(field, bytes) else repr(field).encode()
        framed.update(len(data).to_bytes(8, "little"))
        framed.update(data)
    return framed.digest()


class EmbeddingCache(Generic[V]):
    """Values by key within `capacity` bytes; the least recently used leaves first.

    Lives on the event loop. `size` gives a value's bytes, `on_eviction` counts; a capacity of 0
    keeps nothing.
    """

    def __init__(
        self, capacity: int, size: Callable[[V], int], on_eviction: Callable[[], None]
    ) -> None:
        self._capacity = capacity
        self._size = size
        self._on_eviction = on_eviction
        self._entries: OrderedDict[bytes, V] = OrderedDict()
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> V | None:
        """The value, now the most recently used; None if it is not held."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, value: V) -> None:
        """Keeps `value`, unless it alone exceeds the capacity."""
        needed = ENTRY_BYTES + self._size(value)
        if needed > self._capacity:
            return
        self._remove(key)
        while self.byte_count + needed > self._capacity:
            self._remove(next(iter(self._entries)))
            self._on_eviction()
        self._entries[key] = value
        self.byte_count += needed

    def _remove(self, key: bytes) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.byte_count -= ENTRY_BYTES + self._size(old)
