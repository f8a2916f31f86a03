"""`python -m benchmarks.gateway COMMAND`: what the gateway costs.

It stands before an LLM service of no model; both and what asks are processes of their own. Each
answer is checked.

cost    tokens/s and CPU by how many streams run at once and how many tokens come in a message (the
        LLM service sends what gathered since its last message). "direct" asks by gRPC what
        "gateway" asks by HTTP, one after the other in each round. CPU, in microseconds a token, is
        user and system time of all threads: of the gateway's process, and of the process that reads
        the direct answers, which is what a gateway that did nothing would need at least. "paced":
        each stream has a message every 20 ms, as from an engine, where full speed spares wake-ups.
        A request's own cost is in these figures, spread over its tokens, and apart in a last line.
first   time to the first text, by HTTP and directly, asked in turn; and the same while 32 paced
        streams run through the gateway. "added" is the one quantile less the other.
memory  the gateway's resident memory while requests of all kinds come and one in twenty leaves.
health  how long `/health` takes while large pictures and embeddings arrive all at once.
start   time from the process's start until `/health` answers, and what the imports take.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import uvloop

from benchmarks.engine_client import AnswerFailed
from benchmarks.gateway_drive import (
    CHAT,
    Direct,
    Http,
    Pair,
    Running,
    ask,
    check,
    child,
    pair,
    quantile,
)
from benchmarks.gateway_llm import Plan
from benchmarks.gateway_pictures import EMBEDDINGS, PICTURES, small_picture

STREAMS: Final = (1, 32, 256)
PER_MESSAGE: Final = (1, 4, 16)
PACED_AT_MOST: Final = 32
PAUSE_SECONDS: Final = 0.02
LEAVING_SHARE: Final = 0.05


def us(seconds: float, count: int) -> float:
    return 1e6 * seconds / count


# ---- cost


@dataclass(frozen=True)
class Spent:
    """What an answer of each of some streams took together; CPU in microseconds a token."""

    tokens_per_second: float
    gateway_us: float
    reader_us: float


class Both:
    """The two ways to ask, with as many connections as there are streams."""

    def __init__(self, processes: Pair, direct: Direct, connections: Sequence[Http]) -> None:
        self.processes = processes
        self.direct = direct
        self.connections = connections

    @classmethod
    async def open(cls, processes: Pair, streams: int) -> "Both":
        connections = [await Http.open(processes.gateway.port) for _ in range(streams)]
        return cls(processes, Direct(processes.llm.port), connections)

    async def by_grpc(self, plan: Plan) -> Spent:
        return await self._spent(plan, lambda _: self.direct.ask(plan))

    async def by_http(self, plan: Plan) -> Spent:
        spent = await self._spent(plan, lambda connection: ask(connection, plan))
        for connection in self.connections:
            check(connection, plan)
        return spent

    async def close(self) -> None:
        await self.direct.close()
        for connection in self.connections:
            connection.leave()

    async def _spent(self, plan: Plan, way: Callable[[Http], Awaitable[float]]) -> Spent:
        tokens = plan.tokens * len(self.connections)
        gateway, ours = self.processes.gateway.cpu_seconds, time.process_time()
        began = time.perf_counter()
        await asyncio.gather(*map(way, self.connections))
        seconds = time.perf_counter() - began
        ours, gateway = time.process_time() - ours, self.processes.gateway.cpu_seconds - gateway
        return Spent(tokens / seconds, us(gateway, tokens), us(ours, tokens))


async def cost(options: argparse.Namespace) -> None:
    """Prints the table of tokens/s and CPU."""
    print("| streams | tokens a message | tokens/s direct | tokens/s gateway | of direct "
          "| gateway, µs a token | paced | direct reader, µs a token | paced |")  # fmt: skip
    print("|" + 9 * "---:|")
    with pair() as processes:
        for streams in options.streams:
            both = await Both.open(processes, streams)
            for per_message in options.per_message:
                await _print_cell(both, streams, per_message, options.rounds)
            await both.close()
        print(f"\nA request of one token: {await _request_us(processes):,.0f} µs of CPU.")


async def _print_cell(both: Both, streams: int, per_message: int, rounds: int) -> None:
    # Long enough for the clock of CPU time, which ticks a hundred times a second.
    tokens = (512 if streams > 1 else 4096) * (1 if streams > PACED_AT_MOST else per_message)
    direct, gateway = await _rounds(both, Plan(tokens, per_message), rounds)
    paced = [f"{gateway.gateway_us:.1f}", "-", f"{direct.reader_us:.1f}", "-"]
    if streams <= PACED_AT_MOST:
        plan = Plan(per_message * 200, per_message, PAUSE_SECONDS)
        slow_direct, slow_gateway = await _rounds(both, plan, rounds)
        paced[1], paced[3] = f"{slow_gateway.gateway_us:.1f}", f"{slow_direct.reader_us:.1f}"
    rates = (direct.tokens_per_second, gateway.tokens_per_second)
    print(f"| {streams} | {per_message} | {rates[0]:,.0f} | {rates[1]:,.0f} "
          f"| {rates[1] / rates[0]:.2f} | {' | '.join(paced)} |", flush=True)  # fmt: skip


async def _rounds(both: Both, plan: Plan, rounds: int) -> tuple[Spent, Spent]:
    """Medians of both ways; the first round warms up."""
    done = [(await both.by_grpc(plan), await both.by_http(plan)) for _ in range(rounds + 1)][1:]
    direct, gateway = zip(*done, strict=True)
    return _median(direct), _median(gateway)


def _median(spent: Sequence[Spent]) -> Spent:
    return Spent(
        statistics.median(one.tokens_per_second for one in spent),
        statistics.median(one.gateway_us for one in spent),
        statistics.median(one.reader_us for one in spent),
    )


async def _request_us(processes: Pair, count: int = 2000) -> float:
    connection = await Http.open(processes.gateway.port)
    before = processes.gateway.cpu_seconds
    for _ in range(count):
        await ask(connection, Plan(1))
    connection.leave()
    return us(processes.gateway.cpu_seconds - before, count)


# ---- first


async def first(options: argparse.Namespace) -> None:
    """Prints the table of times to the first text."""
    print("| beside | asked | direct p50, ms | p99 | HTTP p50, ms | p99 | added p50 | added p99 |")
    print("|---|" + 7 * "---:|")
    with pair() as processes:
        await _print_first(processes, "nothing", options.requests)
        with child("benchmarks.gateway_drive", str(processes.gateway.port)):
            await _print_first(processes, "32 paced streams", options.requests)


async def _print_first(processes: Pair, beside: str, count: int) -> None:
    both, plan = await Both.open(processes, 1), Plan(1)
    direct, http = [], []
    for number in range(count + 50):
        taken = await both.direct.ask(plan), await ask(both.connections[0], plan)
        check(both.connections[0], plan)
        if number >= 50:  # these warm up
            direct.append(1e3 * taken[0])
            http.append(1e3 * taken[1])
    await both.close()
    quantiles = [[quantile(times, share) for share in (0.5, 0.99)] for times in (direct, http)]
    added = [there - here for here, there in zip(*quantiles, strict=True)]
    shown = " | ".join(f"{value:.2f}" for value in (*quantiles[0], *quantiles[1], *added))
    print(f"| {beside} | {count} | {shown} |", flush=True)


# ---- memory


@dataclass
class Tally:
    """How many requests were begun, and how they ended."""

    begun: int
    ends: Counter[str]


async def memory(options: argparse.Namespace) -> None:
    """Prints the resident memory as requests go by."""
    print("| requests | resident, MB | open files | threads |\n|---:|---:|---:|---:|")
    marks = [int(options.requests * share) for share in (0.01, 0.1, 0.25, 0.5, 0.75, 1)]
    with pair() as processes:
        tally, began = Tally(0, Counter()), time.perf_counter()
        for mark in marks:
            await asyncio.gather(*(_ask_all_kinds(processes, tally, mark, at) for at in range(32)))
            _print_memory(processes.gateway, tally.begun)
        seconds = time.perf_counter() - began
        print(f"\n{options.requests / seconds:,.0f} requests/s; {dict(tally.ends)}; "
              f"still active: {await _active(processes.gateway.port)}")  # fmt: skip


def _print_memory(gateway: Running, requests: int) -> None:
    process = gateway.process
    print(f"| {requests:,} | {gateway.resident_bytes / 1e6:.1f} | {process.num_fds()} "
          f"| {process.num_threads()} |", flush=True)  # fmt: skip


async def _ask_all_kinds(processes: Pair, tally: Tally, mark: int, seed: int) -> None:
    draw = random.Random(f"{mark} {seed}")
    connection = await Http.open(processes.gateway.port)
    while tally.begun < mark:
        tally.begun += 1
        kind = draw.random()
        if kind < LEAVING_SHARE:
            await _leave_midway(connection, draw)
            connection = await Http.open(processes.gateway.port)
            tally.ends["left"] += 1
        else:
            await connection.send("POST", CHAT, _body_of(kind))
            tally.ends[str(connection.status)] += 1
    connection.leave()


def _body_of(kind: float) -> bytes:
    if kind < 0.1:
        return b'{"model":"no such","messages":[{"role":"user","content":"hi"}]}'
    if kind < 0.2:
        return Plan(16).body(small_picture())
    return Plan(16, 4).body(stream=kind < 0.8)


async def _leave_midway(connection: Http, draw: random.Random) -> None:
    asking = asyncio.ensure_future(ask(connection, Plan(100, 1, 0.01)))
    await asyncio.sleep(draw.uniform(0, 0.1))
    connection.leave()
    await asyncio.gather(asking, return_exceptions=True)


async def _active(port: int) -> str:
    await asyncio.sleep(1)
    connection = await Http.open(port)
    await connection.send("GET", "/metrics")
    connection.leave()
    found = re.search(rb"^chiasm_gateway_active_requests (\S+)$", connection.body, re.MULTILINE)
    return "?" if found is None else str(int(float(found[1])) - 1)


# ---- health


async def health(options: argparse.Namespace) -> None:
    """Prints how long `/health` takes beside large bodies."""
    print("| arriving at once | probes | p50, ms | p99 | longest | all answered after, s |")
    print("|---|" + 5 * "---:|")
    with pair() as processes:
        idle = await _probe(processes.gateway.port, asyncio.create_task(asyncio.sleep(2)))
        print(f"| nothing | {_times(idle)} | - |")
        for kinds in ({"picture": PICTURES}, {"picture": PICTURES - EMBEDDINGS,
                                              "embedding": EMBEDDINGS}):  # fmt: skip
            await _print_burst(processes, kinds, options.rounds)


async def _print_burst(processes: Pair, kinds: dict[str, int], rounds: int) -> None:
    times, taken = [], []
    for _ in range(rounds):
        flags = [str(count) for count in (kinds["picture"], kinds.get("embedding", 0))]
        port = processes.gateway.port
        with child("benchmarks.gateway_pictures", str(port), *flags) as burst:
            began = time.perf_counter()
            ended = asyncio.create_task(asyncio.to_thread(burst.line))
            times += await _probe(port, ended)
            taken.append(time.perf_counter() - began)
            statuses = json.loads(await ended)
            if statuses != {"200": PICTURES}:
                raise AnswerFailed(f"not all were answered: {statuses}")
    what = " and ".join(f"{count} {kind}s" for kind, count in kinds.items())
    print(f"| {what} | {_times(times)} | {statistics.median(taken):.1f} |", flush=True)


async def _probe(port: int, until: "asyncio.Task[object]") -> list[float]:
    """Milliseconds of each `/health`, one after the other."""
    connection, times = await Http.open(port), []
    while not until.done():
        await connection.send("GET", "/health")
        times.append(1e3 * (time.perf_counter() - connection.began))
        await asyncio.sleep(0.005)
    connection.leave()
    return times


def _times(times: Sequence[float]) -> str:
    shown = (quantile(times, 0.5), quantile(times, 0.99), max(times))
    return f"{len(times)} | " + " | ".join(f"{value:.1f}" for value in shown)


# ---- start


async def start(options: argparse.Namespace) -> None:
    """Prints how long the start takes, and which imports take the longest."""
    seconds = [_start_seconds() for _ in range(options.rounds + 1)][1:]
    print(f"`/health` answers after {statistics.median(seconds):.2f} s ", end="")
    print(f"(median of {len(seconds)}, longest {max(seconds):.2f}).")
    _print_imports()


def _print_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import gateway.__main__, gateway.server"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = re.findall(r"import time:\s+(\d+) \|\s+(\d+) \|( +)(\S+)", done.stderr)
    names = {name.partition(".")[0] for *_, name in lines}
    print(f"Imports: {sum(int(own) for own, *_ in lines) / 1e3:.0f} ms of {len(lines)} modules; "
          f"torch among them: {'torch' in names}.")  # fmt: skip
    own: Counter[str] = Counter()
    for took, _, _, name in lines:
        own[name.partition(".")[0]] += int(took)
    print(", ".join(f"{name} {took / 1e3:.0f} ms" for name, took in own.most_common(10)))


def _start_seconds() -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not _is_healthy(port):
            time.sleep(0.005)
        return time.perf_counter() - began
    finally:
        process.kill()
        process.wait()


def _is_healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            return b" 200 " in probe.recv(64)
    except ConnectionError:
        return False


def main() -> None:
    """Runs one command, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = {"cost": cost, "first": first, "memory": memory, "health": health, "start": start}
    parser.add_argument("command", nargs="?", choices=[*commands, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5, help="of each cell (default 5)")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--per-message", type=int, nargs="+", default=PER_MESSAGE)
    parser.add_argument("--requests", type=int, help="of first (1,000) and memory (10,000)")
    options = parser.parse_args()
    chosen = list(commands) if options.command == "all" else [options.command]
    wanted = options.requests
    for name in chosen:
        options.requests = wanted or {"memory": 10_000}.get(name, 1_000)
        print(f"\n### {name}\n")
        uvloop.run(commands[name](options))


if __name__ == "__main__":
    main()
