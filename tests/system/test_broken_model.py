"""A model that computes nothing any more: the process says so, ends, and leaves nobody waiting."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.client import AsyncClient
from chiasm.conversation import Sampling, user
from chiasm.errors import ChiasmError
from tests.system.processes import ServiceProcess, start_gateway
from tests.system.three import figure

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

LENGTH = 1800
LONG = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
PATIENCE_SECONDS = 20.0
SECRETS = ("0x7f00", "RuntimeError", "Traceback")


@pytest.fixture
def processes(tiny_checkpoint: Path) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """An LLM service whose model can be broken, with places for two answers, and its gateway."""
    flags = (
        "--port=0",
        "--metrics-port=0",
        "--torch-threads=1",
        "--vision=none",
        "--max-running=2",
        "--step-limit-seconds=2",
    )
    with ExitStack() as stack:
        llm = stack.enter_context(
            ServiceProcess(
                "-m", "tests.system.breakable_llm", "--model", str(tiny_checkpoint), *flags
            )
        )
        yield llm, stack.enter_context(start_gateway(llm.port))


async def _health(llm: ServiceProcess, heard: list[int]) -> None:
    """Notes each state of health that the service tells, until it is gone."""
    # A plain channel: our own sends nothing to a server that says NOT_SERVING.
    async with grpc.aio.insecure_channel(llm.target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for told in watch:
                heard.append(told.status)


@dataclass
class Waiter:
    """One who waits for an answer: how much has come, and what ended it."""

    pieces: int = 0
    failure: str = ""

    async def over_grpc(self, client: AsyncClient) -> None:
        try:
            async for _ in client.stream([user("Go on and on.")], LONG):
                self.pieces += 1
        except ChiasmError as error:
            self.failure = f"{error.reason.value} {error}"

    async def over_http(self, http: httpx.AsyncClient, stream: bool) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "And on."}], "temperature": 0,
            "max_tokens": LENGTH, "ignore_eos": True, "stream": stream,
        }  # fmt: skip
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                self.pieces += 1
                if '"error"' in line:
                    self.failure = f"{response.status_code} {line}"


async def _until(holds: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "logged"),
    [
        (signal.SIGUSR1, ("the decoder fails on a known token", SECRETS[0])),
        (signal.SIGUSR2, ("a step does not end",)),
    ],
    ids=["raises", "hangs"],
)
async def test_all_who_wait_are_told_and_the_process_ends_with_a_failure(
    processes: tuple[ServiceProcess, ServiceProcess],
    number: signal.Signals,
    logged: tuple[str, ...],
) -> None:
    llm, gateway = processes
    waiters = [Waiter() for _ in range(6)]
    heard: list[int] = []
    async with (
        AsyncClient(llm.target, timeout=None) as client,
        httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(_health(llm, heard))
        # Two run; the others wait in the queue.
        tasks.create_task(waiters[0].over_grpc(client))
        tasks.create_task(waiters[1].over_http(http, stream=True))
        await _until(lambda: waiters[0].pieces and waiters[1].pieces)
        tasks.create_task(waiters[2].over_grpc(client))
        tasks.create_task(waiters[3].over_http(http, stream=True))
        tasks.create_task(waiters[4].over_http(http, stream=False))
        tasks.create_task(waiters[5].over_http(http, stream=False))
        await _until(lambda: figure(llm, "chiasm_rpc_active_calls") == 6)
        assert (await http.get("/ready")).status_code == 200

        llm.send_signal(number)
        await _until(lambda: all(one.failure for one in waiters))
        assert await asyncio.to_thread(llm.wait, PATIENCE_SECONDS) == 1
        assert (await http.get("/ready")).status_code == 503
        late = Waiter()
        await late.over_http(http, stream=False)
        assert late.failure.startswith("503")
    assert heard[0] == health_pb2.HealthCheckResponse.SERVING
    assert heard[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
    assert gateway.alive
    told = " ".join(one.failure for one in waiters)
    assert not any(secret in told for secret in SECRETS)
    # The log has what the wire has not.
    assert all(line in llm.log() for line in logged)
