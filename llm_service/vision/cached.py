"""A vision source behind a cache of its rows, keyed by tenant, encoder and content."""

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import replace

from chiasm.embedding_cache import EmbeddingCache, embedding_key
from chiasm.models.identity import EncoderIdentity
from llm_service.embeddings import Rows
from llm_service.vision.source import Fetched, Sought, VisionSource


class CachedSource:
    """Asks `source` only for pictures whose rows are not held. Only successes are kept."""

    def __init__(
        self,
        source: VisionSource,
        identity: EncoderIdentity,
        entries: EmbeddingCache[Rows],
        workers: Executor,
    ) -> None:
        self._source = source
        self._identity = identity
        self._workers = workers
        self._entries = entries

    async def encode(self, sought: Sought) -> Fetched:
        began = time.monotonic()
        key = self._key(sought)
        rows = self._entries.get(key)
        if rows is not None:
            return Fetched(rows, "cache", fetch_seconds=time.monotonic() - began)
        fetched = await self._source.encode(sought)
        rows = await asyncio.get_running_loop().run_in_executor(
            self._workers, fetched.rows.named, self._identity
        )
        self._entries.put(key, rows)
        return replace(fetched, rows=rows)

    async def close(self) -> None:
        await self._source.close()

    def _key(self, sought: Sought) -> bytes:
        image = sought.image
        return embedding_key(
            sought.asked.tenant, self._identity, sought.digest, len(image.data), image.options
        )
