"""Embeddings kept for later calls: bounded by bytes, the least recently used leaves first."""

import hashlib
from collections import OrderedDict
from dataclasses import astuple, dataclass

from chiasm.models.identity import EncoderIdentity
from chiasm.models.vision import ImageFeatures
from encoder_service.metrics import EncoderMetrics

# Bytes of an entry besides its tensors: key, objects and places in tables.
_ENTRY_BYTES = 2048


@dataclass(frozen=True)
class Options:
    """What a caller chose that may change the pixels. `detail` is the wire's number."""

    detail: int
    min_pixels: int | None
    max_pixels: int | None


def key_of(
    tenant: str, identity: EncoderIdentity, digest: bytes, byte_count: int, options: Options
) -> bytes:
    """32 bytes that differ if any of what decides an embedding, or its owner, differs.

    `digest` is the SHA-256 of the picture file and `byte_count` its length. Each field is framed by
    its length, so that no two lists of fields give the same bytes.
    """
    framed = hashlib.sha256()
    fields = (tenant, *astuple(identity), digest, byte_count, *astuple(options))
    for field in fields:
        data = field if isinstance(field, bytes) else repr(field).encode()
        framed.update(len(data).to_bytes(8, "little"))
        framed.update(data)
    return framed.digest()


class EmbeddingCache:
    """Features by key, within `capacity` bytes. Lives on the event loop."""

    def __init__(self, capacity: int, metrics: EncoderMetrics) -> None:
        self._capacity = capacity
        self._metrics = metrics
        self._entries: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self.byte_count = 0

    def get(self, key: bytes) -> ImageFeatures | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, features: ImageFeatures) -> None:
        """Keeps `features`, unless they alone exceed the capacity."""
        size = _size(features)
        if size > self._capacity:
            return
        self._remove(key)
        while self.byte_count + size > self._capacity:
            self._remove(next(iter(self._entries)))
            self._metrics.evictions.inc()
        self._entries[key] = features
        self.byte_count += size
        self._observe()

    def _remove(self, key: bytes) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.byte_count -= _size(old)

    def _observe(self) -> None:
        self._metrics.cache_bytes.set(self.byte_count)
        self._metrics.cache_entries.set(len(self._entries))


def _size(features: ImageFeatures) -> int:
    return _ENTRY_BYTES + tensor_bytes(features)


def tensor_bytes(features: ImageFeatures) -> int:
    """Bytes of the rows and of all levels."""
    return features.rows.nbytes + sum(level.nbytes for level in features.levels)
