"""Several encoders, one or two LLM services and a gateway, as processes that a test may hurt."""

import asyncio
import contextlib
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from tests.system.footprint import descriptor_count, memory, thread_count
from tests.system.processes import ServiceProcess, start_encoder, start_llm
from tests.system.three import figure

Fault = Literal["kill", "stop"]
REQUEST_SECONDS = 60.0
# A service dies with the thread that started it, so that thread outlives the event loop of a test.
_STARTERS = ThreadPoolExecutor(4, "starter")


async def in_thread(work: Callable[[], None]) -> None:
    """Runs what starts or stops processes beside the event loop."""
    await asyncio.get_running_loop().run_in_executor(_STARTERS, work)


def free_port() -> int:
    """A port that is free now, so that a process can come back to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Encoder:
    """An encoder service that keeps its port through restarts."""

    def __init__(self, model: Path, flags: Sequence[str] = ()) -> None:
        self.port = free_port()
        self._model, self._flags = model, flags
        self.process = self._started()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def restart(self) -> None:
        """Starts it again after its end."""
        self.process.close()
        self.process = self._started()

    def roll(self) -> None:
        """An orderly restart: SIGTERM, drain, end, start. Raises if the end was not orderly."""
        self.process.terminate()
        assert self.process.wait() == 0
        self.restart()

    def _started(self) -> ServiceProcess:
        flags = ("--port", str(self.port), "--drain-seconds", "2", *self._flags)
        return start_encoder(self._model, *flags)


@dataclass
class Fleet:
    """The processes, ready."""

    encoders: list[Encoder]
    llms: list[ServiceProcess]
    gateway: ServiceProcess
    model: str
    stack: ExitStack = field(repr=False)

    @property
    def llm(self) -> ServiceProcess:
        return self.llms[0]

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that gives up only after the system should have."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.gateway.url, timeout=REQUEST_SECONDS + 15, limits=limits, trust_env=False
        ) as client:
            yield client

    def close(self) -> None:
        for encoder in self.encoders:
            # A process that is stopped cannot be told anything else.
            encoder.process.send_signal(signal.SIGCONT)
            encoder.process.close()


@contextmanager
def fleet(
    model: Path,
    encoder_count: int = 4,
    *,
    llm_count: int = 1,
    encoder_flags: Sequence[str] = (),
    llm_flags: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Starts all for the checkpoint in `model`. The LLM service keeps no features of its own."""
    with ExitStack() as stack:
        encoders = [Encoder(model, encoder_flags) for _ in range(encoder_count)]
        targets = ",".join(encoder.target for encoder in encoders)
        flags = ("--encoders", targets, "--embedding-cache-bytes", "0", *llm_flags)
        llms = [stack.enter_context(start_llm(model, *flags)) for _ in range(llm_count)]
        # gRPC's form for several fixed addresses behind one channel.
        behind = ",".join(f"127.0.0.1:{llm.port}" for llm in llms)
        gateway = stack.enter_context(
            _gateway(f"ipv4:{behind}", "--request-timeout-seconds", str(REQUEST_SECONDS))
        )
        made = Fleet(encoders, llms, gateway, model.name, stack)
        try:
            yield made
        finally:
            made.close()


def _gateway(target: str, *flags: str) -> ServiceProcess:
    common = ("--port", "0", "--drain-seconds", "0")
    return ServiceProcess("-m", "gateway", "--llm", target, *common, *flags)


class Chaos:
    """Hurts one encoder after the other, at random from `seed`, until told to end."""

    def __init__(self, encoders: Sequence[Encoder], seed: int) -> None:
        self._encoders = encoders
        self._chance = random.Random(seed)
        self._ended = asyncio.Event()
        self.faults: list[Fault] = []

    async def run(self) -> None:
        while not self._ended.is_set():
            encoder = self._chance.choice(self._encoders)
            fault: Fault = self._chance.choice(["kill", "stop"])
            self.faults.append(fault)
            await (self._kill(encoder) if fault == "kill" else self._stop(encoder))
            await self._pause(self._chance.uniform(0.5, 2))

    def end(self) -> None:
        self._ended.set()

    async def _kill(self, encoder: Encoder) -> None:
        encoder.process.kill()
        await self._pause(self._chance.uniform(0, 2))
        await in_thread(encoder.restart)

    async def _stop(self, encoder: Encoder) -> None:
        encoder.process.send_signal(signal.SIGSTOP)
        await self._pause(self._chance.uniform(1, 12))
        encoder.process.send_signal(signal.SIGCONT)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)


@dataclass(frozen=True)
class Held:
    """What a process holds: threads, descriptors, bytes resident."""

    threads: int
    descriptors: int
    resident: int


def held(process: ServiceProcess) -> Held:
    return Held(thread_count(process), descriptor_count(process), memory(process).now)


def idle(fleet: Fleet) -> bool:
    """Whether nothing is in hand in the LLM services and the gateway."""
    return (
        all(
            figure(llm, "chiasm_llm_kv_blocks_used") == 0
            and figure(llm, "chiasm_rpc_active_calls") == 0
            and figure(llm, "chiasm_llm_encoder_outstanding_rows") == 0
            for llm in fleet.llms
        )
        and figure(fleet.gateway, "chiasm_gateway_active_requests") <= 1
    )
