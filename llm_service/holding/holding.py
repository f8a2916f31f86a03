"""Held embeddings as the rest of the service sees them: this node's memory, and a shared store."""

from collections.abc import Callable
from typing import Literal, Protocol

from chiasm.errors import ChiasmError, Reason
from llm_service.embeddings import Rows
from llm_service.holding.memory import MemoryStore
from llm_service.holding.shared import SharedStore, StoreDown
from llm_service.holding.values import Binding, Held

Found = Literal["memory", "shared", "absent", "unreachable"]
_RETRY_SECONDS = 1.0


class Holding(Protocol):
    """Embeddings of tenants, by id and by alias. No tenant finds what is another's."""

    async def put(self, tenant: str, rows: Rows) -> Held:
        """Holds named `rows`; the same rows keep their id. Raises TENSOR_TOO_LARGE if too many."""
        ...

    async def get(self, tenant: str, id: str) -> Held:
        """What is held under `id`. Raises EMBEDDING_NOT_FOUND, or NOT_READY where it is not known
        because the store cannot be reached."""
        ...

    async def named(self, tenant: str, alias: str, *, sure: bool = False) -> Binding | None:
        """What the tenant's alias names, as far as is known.

        `sure`: raises NOT_READY where it is not known because the store cannot be reached.
        """
        ...

    async def bind(self, tenant: str, alias: str, binding: Binding) -> Binding:
        """What `alias` names from now on: `binding`, unless it names another already."""
        ...

    async def close(self) -> None: ...


class Stores:
    """Memory, and behind it a shared store if there is one.

    The shared store's word on aliases goes before memory's; where it is silent memory's holds.
    """

    def __init__(
        self, memory: MemoryStore, shared: SharedStore | None, count: Callable[[Found], None]
    ) -> None:
        self._memory = memory
        self._shared = shared
        self._count = count

    async def put(self, tenant: str, rows: Rows) -> Held:
        held = self._memory.put(tenant, rows)
        if not await self._share(tenant, held) and not self._memory.holds(tenant, held.id):
            raise ChiasmError(
                Reason.TENSOR_TOO_LARGE,
                f"The embedding has {rows.byte_count} bytes, more than this service holds; send "
                "it with each request.",
            )
        return held

    async def get(self, tenant: str, id: str) -> Held:
        held = self._memory.get(tenant, id)
        if held is not None:
            self._count("memory")
            return held
        held = await self._fetch(tenant, id)
        if held is None:
            self._count("absent")
            raise not_found()
        self._count("shared")
        self._memory.keep(tenant, held)
        return held

    async def named(self, tenant: str, alias: str, *, sure: bool = False) -> Binding | None:
        known, told, silent = self._memory.named(tenant, alias), None, False
        if self._shared is not None:
            try:
                told = await self._shared.named(tenant, alias)
            except StoreDown:
                silent = True
        if told is not None and told != known:
            self._memory.bind(tenant, alias, told)
        if sure and silent and known is None:
            raise _unreachable()
        return told or known

    async def bind(self, tenant: str, alias: str, binding: Binding) -> Binding:
        current = await self.named(tenant, alias)
        if current is not None and not current.agrees(binding):
            return current
        if self._shared is not None:
            try:
                current = await self._shared.bind(tenant, alias, binding)
            except StoreDown:  # the alias works on this node
                current = binding
            if not current.agrees(binding):  # another node was quicker
                return current
        self._memory.bind(tenant, alias, binding)
        return binding

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()

    async def _share(self, tenant: str, held: Held) -> bool:
        if self._shared is None:
            return False
        try:
            await self._shared.put(tenant, held)
        except StoreDown:  # the reference works on this node
            return False
        return True

    async def _fetch(self, tenant: str, id: str) -> Held | None:
        if self._shared is None:
            return None
        try:
            return await self._shared.get(tenant, id)
        except StoreDown:
            self._count("unreachable")
            raise _unreachable() from None


def _unreachable() -> ChiasmError:
    return ChiasmError(
        Reason.NOT_READY,
        "This node does not hold the embedding, and the store that may hold it cannot be reached. "
        "Try again, or send the data again.",
        retry_after=_RETRY_SECONDS,
    )


def not_found() -> ChiasmError:
    """The same for an id that never was, that is another tenant's, and that has expired."""
    return ChiasmError(
        Reason.EMBEDDING_NOT_FOUND,
        "No embedding is held under this reference: it has expired or was given up for room, or "
        "it was never yours. Send the data again.",
    )
