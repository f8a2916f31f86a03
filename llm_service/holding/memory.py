"""Held embeddings in this process: within bytes, for a time, the oldest leaving first."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from chiasm.embedding_cache import ENTRY_BYTES
from llm_service.embeddings import Rows
from llm_service.holding.values import Binding, Held, content_key, new_id

Cause = Literal["age", "room"]
Name = tuple[str, str]
"""Tenant and id, or tenant and alias."""
MAX_ALIASES = 65_536


class MemoryStore:
    """Lives on the event loop.

    `seconds` is how long an entry is held, `capacity` the bytes of all; `on_drop` counts.
    """

    def __init__(
        self,
        seconds: float,
        capacity: int,
        on_drop: Callable[[Cause], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._seconds = seconds
        self._capacity = capacity
        self._on_drop = on_drop
        self._now = now
        # Both in the order of their expiry, but for what came from a shared store.
        self._entries: OrderedDict[Name, Held] = OrderedDict()
        self._aliases: OrderedDict[Name, tuple[Binding, float]] = OrderedDict()
        self._ids: dict[bytes, str] = {}
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tenant: str, rows: Rows) -> Held:
        """Holds named `rows`, under the id that they have already if they are held.

        What alone exceeds the capacity gets an id too, but is not held: see `holds`.
        """
        self._drop_expired()
        id = self._ids.get(content_key(tenant, rows)) or new_id()
        held = Held(id, rows, self._now() + self._seconds)
        known = self._entries.get((tenant, id))
        self.keep(tenant, held if known is None else replace(held, rows=known.rows))
        return held

    def keep(self, tenant: str, held: Held) -> None:
        """Holds what has an id already."""
        needed = _size(held)
        if needed > self._capacity:
            return
        self._remove((tenant, held.id))
        while self.byte_count + needed > self._capacity:
            self._drop_first("room")
        self._entries[tenant, held.id] = held
        self._ids[content_key(tenant, held.rows)] = held.id
        self.byte_count += needed

    def holds(self, tenant: str, id: str) -> bool:
        """Whether `get` would find it."""
        return self.get(tenant, id) is not None

    def get(self, tenant: str, id: str) -> Held | None:
        """What is held under `id` of that tenant and has not expired."""
        self._drop_expired()
        held = self._entries.get((tenant, id))
        return held if held is not None and held.expires_at > self._now() else None

    def bind(self, tenant: str, alias: str, binding: Binding) -> None:
        """Makes `alias` name `binding`, whatever it named before."""
        self._aliases.pop((tenant, alias), None)
        while len(self._aliases) >= MAX_ALIASES:
            self._aliases.popitem(last=False)
        self._aliases[tenant, alias] = (binding, self._now() + self._seconds)

    def named(self, tenant: str, alias: str) -> Binding | None:
        """What `alias` names, if it has not expired."""
        self._drop_expired()
        binding, expires_at = self._aliases.get((tenant, alias), (None, 0.0))
        return binding if expires_at > self._now() else None

    def _drop_expired(self) -> None:
        now = self._now()
        while self._entries and next(iter(self._entries.values())).expires_at <= now:
            self._drop_first("age")
        while self._aliases and next(iter(self._aliases.values()))[1] <= now:
            self._aliases.popitem(last=False)

    def _drop_first(self, cause: Cause) -> None:
        self._remove(next(iter(self._entries)))
        self._on_drop(cause)

    def _remove(self, name: Name) -> None:
        held = self._entries.pop(name, None)
        if held is not None:
            self._ids.pop(content_key(name[0], held.rows), None)
            self.byte_count -= _size(held)


def _size(held: Held) -> int:
    return ENTRY_BYTES + held.rows.byte_count
