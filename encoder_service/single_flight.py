"""One computation for all who ask for the same picture at the same time, then the cache.

A caller who leaves takes nothing from the others; when the last one leaves, the queued work is
dropped. Only successes are kept.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum

from chiasm.embedding_cache import EmbeddingCache
from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import PixelOptions
from chiasm.models.vision import ImageFeatures
from chiasm.rpc.context import seconds_left
from encoder_service.batcher import Batcher, Encoded, Interest, Item, StageTimes
from encoder_service.metrics import EncoderMetrics
from encoder_service.tower import Measure


class Source(Enum):
    """Where features came from; the value is the metric's label."""

    COMPUTED = "miss"
    SHARED = "shared"
    CACHE = "hit"


@dataclass(frozen=True)
class Obtained:
    """Features for one caller. The times are zero for a cache hit."""

    features: ImageFeatures
    times: StageTimes
    source: Source


class SingleFlight:
    """Features by key: kept, being computed, or computed now."""

    def __init__(
        self, batcher: Batcher, cache: EmbeddingCache[ImageFeatures], metrics: EncoderMetrics
    ) -> None:
        self._batcher = batcher
        self._cache = cache
        self._metrics = metrics
        self._flying: dict[bytes, Item] = {}

    async def obtain(
        self,
        key: bytes,
        data: memoryview,
        options: PixelOptions,
        request_id: str,
        deadline: float | None,
    ) -> Obtained:
        """The features of the picture `data` under `options`, whose key is `key`.

        Raises ChiasmError: what is wrong with the picture, QUEUE_FULL, or DEADLINE.
        """
        size: Measure | None = None
        while True:
            kept = self._cache.get(key)
            if kept is not None:
                self._count(Source.CACHE)
                return Obtained(kept, StageTimes(), Source.CACHE)
            if (item := self._joinable(key)) is not None:
                return await self._landing(item, Source.SHARED, deadline)
            if size is not None:
                item = self._take_off(key, data, options, size, request_id)
                return await self._landing(item, Source.COMPUTED, deadline)
            # Another may take off meanwhile: look again.
            size = await self._batcher.measure(data, options)

    def _joinable(self, key: bytes) -> Item | None:
        item = self._flying.get(key)
        # A result may be there an instant before it is in the cache.
        failed = item and item.result.done() and item.result.exception() is not None
        return None if failed else item

    def _take_off(
        self, key: bytes, data: memoryview, options: PixelOptions, size: Measure, request_id: str
    ) -> Item:
        item = self._batcher.submit(data, options, size, request_id, Interest())
        self._flying[key] = item
        item.result.add_done_callback(lambda done: self._landed(key, item, done))
        return item

    def _landed(self, key: bytes, item: Item, done: "asyncio.Future[Encoded]") -> None:
        if self._flying.get(key) is item:
            del self._flying[key]
        if done.exception() is None:
            self._cache.put(key, done.result().features)

    async def _landing(self, item: Item, source: Source, deadline: float | None) -> Obtained:
        self._count(source)
        waiter = item.interest.join(deadline)
        try:
            async with asyncio.timeout(None if deadline is None else seconds_left(deadline)):
                encoded = await asyncio.shield(item.result)
                return Obtained(encoded.features, encoded.times, source)
        except TimeoutError:
            text = "The deadline passed before the picture was encoded."
            raise ChiasmError(Reason.DEADLINE, text) from None
        finally:
            item.interest.leave(waiter)
            self._batcher.discard_if_lost(item)

    def _count(self, source: Source) -> None:
        self._metrics.lookups.labels(source.value).inc()
