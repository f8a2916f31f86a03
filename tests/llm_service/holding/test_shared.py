"""Several nodes before one store, which is killed, hung, filled and damaged while they work."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis.asyncio import Redis

from chiasm.errors import ChiasmError, Reason
from llm_service.embeddings import Rows
from llm_service.holding.holding import Found, Stores
from llm_service.holding.memory import MemoryStore
from llm_service.holding.shared import SharedSettings, SharedStore
from llm_service.holding.values import Binding, Held
from tests.llm_service.holding.rig import CONTRACT, COUNT, WIDTH, rows, same
from tests.llm_service.holding.store_server import StoreServer, needs_server, store_server

pytestmark = needs_server
TIMEOUT = 0.3
ROOM = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    with store_server(tmp_path) as running:
        yield running


@dataclass
class Node:
    """One LLM service's stores, and what they counted."""

    stores: Stores
    memory: MemoryStore
    found: list[Found] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)


@asynccontextmanager
async def node(
    server: StoreServer, *, seconds: float = 60, rest: float = 0.0, capacity: int = ROOM
) -> AsyncIterator[Node]:
    with ThreadPoolExecutor(2) as workers:
        failures: list[int] = []
        found: list[Found] = []
        memory = MemoryStore(seconds, capacity, lambda cause: None)
        settings = SharedSettings(server.url, seconds, TIMEOUT, rest)
        shared = SharedStore(settings, CONTRACT, workers, lambda: failures.append(1))
        stores = Stores(memory, shared, found.append)
        try:
            yield Node(stores, memory, found, failures)
        finally:
            await stores.close()


async def refusal(stores: Stores, tenant: str, id: str) -> Reason:
    with pytest.raises(ChiasmError) as failure:
        await stores.get(tenant, id)
    return failure.value.reason


def binding(held: Held, kept: Rows) -> Binding:
    return Binding(held.id, kept.digest)


async def test_what_one_node_put_another_finds_for_the_same_tenant_alone(
    server: StoreServer,
) -> None:
    async with node(server) as one, node(server) as two:
        held = await one.stores.put("a", rows(1))
        found = await two.stores.get("a", held.id)
        assert same(found.rows, held.rows)
        assert abs(found.expires_at - held.expires_at) < 1
        await two.stores.get("a", held.id)
        assert two.found == ["shared", "memory"]
        assert await refusal(two.stores, "b", held.id) is Reason.EMBEDDING_NOT_FOUND
        assert await refusal(one.stores, "b", held.id) is Reason.EMBEDDING_NOT_FOUND


async def test_an_entry_leaves_all_nodes_at_its_age(server: StoreServer) -> None:
    async with node(server, seconds=0.5) as one, node(server, seconds=0.5) as two:
        held = await one.stores.put("a", rows(1))
        assert (await two.stores.get("a", held.id)).expires_at <= held.expires_at + 0.1
        await asyncio.sleep(0.6)
        for each in (one, two):
            assert await refusal(each.stores, "a", held.id) is Reason.EMBEDDING_NOT_FOUND


async def test_putting_again_renews_the_age_in_the_store_too(server: StoreServer) -> None:
    async with node(server, seconds=0.8) as one, node(server, seconds=0.8) as two:
        held = await one.stores.put("a", rows(1))
        await asyncio.sleep(0.5)
        assert (await one.stores.put("a", rows(1))).id == held.id
        await asyncio.sleep(0.5)
        assert same((await two.stores.get("a", held.id)).rows, held.rows)


async def test_an_alias_holds_on_every_node_and_never_names_another_picture(
    server: StoreServer,
) -> None:
    async with node(server) as one, node(server) as two:
        first, second = rows(1), rows(2)
        held = await one.stores.put("a", first)
        bound = binding(held, first)
        assert await one.stores.bind("a", "cat", bound) == bound
        assert await two.stores.named("a", "cat") == bound
        other = binding(await two.stores.put("a", second), second)
        assert await two.stores.bind("a", "cat", other) == bound
        assert await two.stores.named("a", "cat") == bound
        assert await two.stores.named("b", "cat") is None


async def test_of_many_that_bind_one_alias_at_once_one_wins_on_all_nodes(
    server: StoreServer,
) -> None:
    async with node(server) as one, node(server) as two:
        kept = [rows(seed) for seed in range(20)]
        wanted = [Binding(f"emb_{number}", each.digest) for number, each in enumerate(kept)]
        told = await asyncio.gather(
            *((one, two)[n % 2].stores.bind("a", "cat", each) for n, each in enumerate(wanted))
        )
        (winner,) = set(told)
        assert await one.stores.named("a", "cat") == await two.stores.named("a", "cat") == winner


async def test_a_killed_store_leaves_each_node_what_it_holds_itself(server: StoreServer) -> None:
    async with node(server) as one, node(server) as two:
        held = await one.stores.put("a", rows(1))
        await one.stores.bind("a", "cat", binding(held, rows(1)))
        server.kill()
        assert same((await one.stores.get("a", held.id)).rows, held.rows)
        assert await one.stores.named("a", "cat") == binding(held, rows(1))
        # Whether it exists is not known here, and that is what is said.
        assert await refusal(two.stores, "a", held.id) is Reason.NOT_READY
        later = await two.stores.put("a", rows(2))
        assert same((await two.stores.get("a", later.id)).rows, later.rows)
        assert one.failures and two.failures


async def test_a_store_that_comes_back_is_used_again(server: StoreServer) -> None:
    async with node(server) as one, node(server) as two:
        held = await one.stores.put("a", rows(1))
        server.kill()
        await one.stores.put("a", rows(2))
        server.start()
        # It lost all: what is put again is shared again, under the id that it has.
        assert (await one.stores.put("a", rows(1))).id == held.id
        assert same((await two.stores.get("a", held.id)).rows, held.rows)


async def test_a_hung_store_costs_its_time_limit_once_and_no_more(server: StoreServer) -> None:
    async with node(server, rest=30) as one:
        await one.stores.put("a", rows(1))
        server.hang()
        try:
            began = time.monotonic()
            for seed in range(2, 12):
                held = await one.stores.put("a", rows(seed))
                assert same((await one.stores.get("a", held.id)).rows, held.rows)
            assert await refusal(one.stores, "a", "emb_unknown") is Reason.NOT_READY
            assert time.monotonic() - began < 3 * TIMEOUT
            assert len(one.failures) == 1
        finally:
            server.go_on()


async def test_a_store_killed_amid_a_crowd_gives_right_rows_or_says_that_it_is_not_known(
    server: StoreServer,
) -> None:
    async with node(server) as one, node(server) as two:
        held = [await one.stores.put("a", rows(seed)) for seed in range(40)]

        told: list[Reason] = []

        async def ask(each: Held) -> bool:
            try:
                found = await two.stores.get("a", each.id)
            except ChiasmError as error:
                told.append(error.reason)
                return False
            assert same(found.rows, each.rows)
            return True

        asking = [asyncio.create_task(ask(each)) for each in held]
        while not any(task.done() for task in asking):
            await asyncio.sleep(0)
        server.kill()
        answered = await asyncio.gather(*asking)
        assert any(answered)
        assert set(told) <= {Reason.NOT_READY}
        server.start()
        for each in held:
            await one.stores.put("a", each.rows)
        assert all(await asyncio.gather(*(ask(each) for each in held)))


async def test_a_full_store_refuses_and_the_node_holds_it_alone(tmp_path: Path) -> None:
    flags = ("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    with store_server(tmp_path, *flags) as server:
        async with node(server) as one, node(server) as two:
            held = await one.stores.put("a", rows(1))
            assert one.failures
            assert same((await one.stores.get("a", held.id)).rows, held.rows)
            assert await refusal(two.stores, "a", held.id) is Reason.EMBEDDING_NOT_FOUND


async def test_what_memory_cannot_hold_lives_in_the_store_and_else_is_refused(
    server: StoreServer,
) -> None:
    async with node(server, capacity=10) as one:
        held = await one.stores.put("a", rows(1))
        assert same((await one.stores.get("a", held.id)).rows, held.rows)
        server.kill()
        with pytest.raises(ChiasmError) as failure:
            await one.stores.put("a", rows(2))
        assert failure.value.reason is Reason.TENSOR_TOO_LARGE
        assert str(COUNT * WIDTH * 4) in failure.value.message


async def test_damaged_values_are_absent_and_counted(server: StoreServer) -> None:
    async with node(server) as one, node(server) as two:
        held = [await one.stores.put("a", rows(seed)) for seed in range(3)]
        client = Redis.from_url(server.url)
        keys = sorted([key async for key in client.scan_iter()])
        assert len(keys) == 3
        assert not any(each.id[4:].encode() in key for each in held for key in keys)
        values = [await client.get(key) for key in keys]
        assert all(isinstance(value, bytes) for value in values)
        await client.set(keys[0], values[1] or b"")  # another's, whole
        await client.set(keys[1], (values[1] or b"")[:-1])
        await client.set(keys[2], b"\x80\x04K\x01.")  # a pickle
        await client.pexpire(keys[0], 60_000)
        await client.pexpire(keys[1], 60_000)
        await client.pexpire(keys[2], 60_000)
        await client.aclose()
        for each in held:
            assert await refusal(two.stores, "a", each.id) is Reason.EMBEDDING_NOT_FOUND
        assert len(two.failures) == 3


async def test_a_value_of_another_type_is_a_failure_and_no_fault(server: StoreServer) -> None:
    async with node(server) as one, node(server) as two:
        held = await one.stores.put("a", rows(1))
        client = Redis.from_url(server.url)
        (key,) = [key async for key in client.scan_iter()]
        await client.delete(key)
        await client.rpush(key, "a list")
        await client.pexpire(key, 60_000)
        await client.aclose()
        assert await refusal(two.stores, "a", held.id) is Reason.NOT_READY
        assert two.failures
