"""An encoder that dies or hangs costs its callers a typed error, and nobody else anything."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from chiasm.conversation import Message, Sampling, user
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc import limits
from tests.system.processes import ServiceProcess, start_encoder
from tests.system.three import Three, asked, figure, noise, three, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

# Below the time after which gRPC gives up a connection whose pings nobody answers.
DEADLINE_SECONDS = 0.8 * limits.PING_TIMEOUT_MS / 1000
# A reply's way back, on a busy machine.
GRACE_SECONDS = 1.5
SHORT = Sampling(temperature=0, max_tokens=4)
PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def own(tiny_checkpoint: Path) -> Iterator[Three]:
    """A system of its own, since its encoder is killed."""
    limit = ("--request-timeout-seconds", str(DEADLINE_SECONDS))
    with three(tiny_checkpoint, gateway_flags=limit) as system:
        yield system


def with_picture(seed: int) -> list[Message]:
    return [user(noise(seed), "What is it?")]


async def complete(http: httpx.AsyncClient, system: Three, turns: list[Message]) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=system.body(turns, max_tokens=4))


@asynccontextmanager
async def stopped(process: ServiceProcess) -> AsyncIterator[None]:
    """The process hangs while inside."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def in_hand(llm: ServiceProcess, count: int) -> None:
    """Waits until the LLM service has `count` calls, and so waits for the encoder itself."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        # In a thread: the calls that are waited for are sent by this event loop.
        while await asyncio.to_thread(figure, llm, "chiasm_rpc_active_calls") < count:
            await asyncio.sleep(0.01)


async def test_a_hung_encoder_costs_the_deadline_and_no_more(own: Three) -> None:
    async with own.http() as http, own.client(seconds=1.0) as client:
        assert (await complete(http, own, with_picture(1))).status_code == 200
        async with stopped(own.encoder):
            began = time.monotonic()
            told = await complete(http, own, with_picture(2))
            assert (told.status_code, told.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert time.monotonic() - began < DEADLINE_SECONDS + GRACE_SECONDS
            # Others are served meanwhile.
            assert await asked(http, own.body([user("Hi")], max_tokens=4))
        assert (await complete(http, own, with_picture(2))).status_code == 200

        async with stopped(own.encoder):
            began = time.monotonic()
            with pytest.raises(ChiasmError) as failed:
                await client.generate(with_picture(3), SHORT)
            assert failed.value.reason is Reason.DEADLINE
            assert time.monotonic() - began < 1.0 + GRACE_SECONDS
        assert (await complete(http, own, with_picture(3))).status_code == 200


async def test_callers_that_leave_a_hung_encoder_leave_no_call_behind(own: Three) -> None:
    def all_gone() -> bool:
        return figure(own.llm, "chiasm_rpc_active_calls") == 0

    async with own.http() as http, own.client() as client, stopped(own.encoder):
        leaving = [
            asyncio.create_task(complete(http, own, with_picture(4))),
            asyncio.create_task(client.generate(with_picture(5), SHORT)),
        ]
        await in_hand(own.llm, 2)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert until(all_gone, 1.0) < 1.0
    assert figure(own.llm, "chiasm_llm_kv_blocks_used") == 0


async def test_a_killed_encoder_is_a_503_at_once_and_pictures_work_when_it_is_back(
    own: Three, tiny_checkpoint: Path
) -> None:
    async with own.http() as http, own.client() as client:
        before = await asked(http, own.body(with_picture(10), max_tokens=4))
        # Stopped first, so that the kill surely falls into the requests.
        own.encoder.send_signal(signal.SIGSTOP)
        over_http = asyncio.create_task(complete(http, own, with_picture(11)))
        over_grpc = asyncio.create_task(client.generate(with_picture(12), SHORT))
        await in_hand(own.llm, 2)
        began = time.monotonic()
        own.encoder.kill()
        check_no_encoder(await over_http)
        with pytest.raises(ChiasmError) as failed:
            await over_grpc
        check_lost(failed.value)
        # It is known to be gone: later requests do not wait.
        check_no_encoder(await complete(http, own, with_picture(13)))
        assert time.monotonic() - began < DEADLINE_SECONDS

        # Text, pictures whose features are held, and health do not need it.
        assert await asked(http, own.body([user("Hi")], max_tokens=4))
        assert await asked(http, own.body(with_picture(10), max_tokens=4)) == before
        assert (await http.get("/ready")).status_code == 200

        with start_encoder(tiny_checkpoint, "--port", str(own.encoder.port)):
            began = time.monotonic()
            while (answer := await complete(http, own, with_picture(14))).status_code != 200:
                check_no_encoder(answer)
                assert time.monotonic() - began < PATIENCE_SECONDS
                await asyncio.sleep(0.1)
            assert (await client.generate(with_picture(12), SHORT)).text
        assert own.llm.alive
        assert own.gateway.alive


def check_no_encoder(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (
        503, "no_encoder", "server_error",
    )  # fmt: skip
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert int(response.headers["retry-after"]) >= 1


def check_lost(error: ChiasmError) -> None:
    assert error.reason is Reason.NO_ENCODER
    assert error.field == "messages[0].parts[0].image"
    assert error.retry_after
