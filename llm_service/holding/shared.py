"""A store in Redis or Valkey that several LLM services share.

It may be slow, down, full or wrong: every call ends within a short time, failures are counted and
said in the log, and after one the store is left alone for a moment. What is read is checked as if a
caller had sent it. Its keys are digests, so that it tells no id, and the model is part of them.
How much it holds is bounded by its own `maxmemory`; give it a policy that evicts.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from chiasm import telemetry
from chiasm.errors import ChiasmError
from chiasm.models.contract import ImageContract
from llm_service.embeddings import Rows
from llm_service.holding.frame import (
    FrameError,
    pack_binding,
    pack_rows,
    unpack_binding,
    unpack_rows,
)
from llm_service.holding.values import Binding, Held

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")
_PREFIX = b"chiasm:1:"
_CONNECTIONS = 32


class StoreDown(Exception):
    """The store did not answer, or not in time."""


@dataclass(frozen=True)
class SharedSettings:
    """Where the store is and how long to wait for it; times in seconds.

    Attributes:
        timeout: of one call.
        rest: for which the store is left alone after a failure.
    """

    url: str
    seconds: float
    timeout: float = 1.0
    rest: float = 1.0


class SharedStore:
    """Speaks to one store for one model."""

    def __init__(
        self,
        settings: SharedSettings,
        contract: ImageContract,
        workers: Executor,
        on_failure: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._contract = contract
        self._workers = workers
        self._on_failure = on_failure
        self._scope = repr(astuple(contract.expected_identity))
        self._client: Redis = _connect(settings)
        self._turns = asyncio.Semaphore(_CONNECTIONS)
        self._resting_until = 0.0

    async def put(self, tenant: str, held: Held) -> None:
        """Stores `held`, or renews its age. Raises StoreDown."""
        key = self._key("rows", tenant, held.id)
        lifetime = self._lifetime
        if await self._ask(lambda: self._client.pexpire(key, lifetime)):
            return
        framed = await self._work(pack_rows, key, held.rows, self._contract.expected_identity)
        await self._ask(lambda: self._client.set(key, framed, px=lifetime))

    async def get(self, tenant: str, id: str) -> Held | None:
        """What is stored under `id` of that tenant. Raises StoreDown."""
        key = self._key("rows", tenant, id)
        framed, left = await self._ask(lambda: self._read(key))
        if framed is None or left <= 0:
            return None
        try:
            rows: Rows = await self._work(unpack_rows, key, framed, self._contract)
        except (FrameError, ChiasmError) as error:
            self._tell_damage(error)
            return None
        return Held(id, rows, time.time() + left / 1000)

    async def bind(self, tenant: str, alias: str, binding: Binding) -> Binding:
        """What `alias` names from now on: `binding`, unless it names another. Raises StoreDown."""
        key = self._key("alias", tenant, alias)
        framed = pack_binding(key, binding)
        if await self._ask(lambda: self._client.set(key, framed, px=self._lifetime, nx=True)):
            return binding
        current = await self.named(tenant, alias)
        if current is not None and not current.agrees(binding):
            return current
        await self._ask(lambda: self._client.set(key, framed, px=self._lifetime))
        return binding

    async def named(self, tenant: str, alias: str) -> Binding | None:
        """What `alias` names. Raises StoreDown."""
        key = self._key("alias", tenant, alias)
        framed = await self._ask(lambda: self._client.get(key))
        try:
            return unpack_binding(key, framed) if isinstance(framed, bytes) else None
        except FrameError as error:
            self._tell_damage(error)
            return None

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def _lifetime(self) -> int:
        return max(1, int(self._settings.seconds * 1000))

    async def _read(self, key: bytes) -> tuple[bytes | None, int]:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.get(key)
            pipe.pttl(key)
            framed, left = await pipe.execute()
        return framed, left

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        from redis.exceptions import RedisError

        try:
            # To wait for one's turn is no failure of the store.
            async with self._turns:
                if time.monotonic() < self._resting_until:
                    raise StoreDown
                async with asyncio.timeout(self._settings.timeout):
                    return await call()
        except (RedisError, OSError, TimeoutError) as error:
            self._resting_until = time.monotonic() + self._settings.rest
            self._on_failure()
            telemetry.logger().warning("reference store failed", detail=type(error).__name__)
            raise StoreDown from error

    async def _work(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)

    def _tell_damage(self, error: Exception) -> None:
        self._on_failure()
        telemetry.logger().warning("reference store gave damaged bytes", detail=str(error))

    def _key(self, kind: str, tenant: str, name: str) -> bytes:
        framed = hashlib.sha256()
        for field in (self._scope, kind, tenant, name):
            data = field.encode()
            framed.update(len(data).to_bytes(8, "little") + data)
        return _PREFIX + framed.hexdigest().encode()


def _connect(settings: SharedSettings) -> "Redis":
    # An optional package: only services that share their references need it.
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    return Redis.from_url(
        settings.url,
        socket_connect_timeout=settings.timeout,
        socket_timeout=settings.timeout,
        # One more try for a pooled connection that died with a restarted store.
        retry=Retry(NoBackoff(), 1),
        max_connections=_CONNECTIONS,
    )
