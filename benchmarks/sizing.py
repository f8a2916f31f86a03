"""`python -m benchmarks.sizing COMMAND`: is what `chiasm plan` says true?

waits    waits before servers by `chiasm.sizing.queueing` against a simulation, over a grid of
         utilisation, servers, variation of the service and group size.
answers  LLM services by `chiasm.sizing.answers` against a simulation of the engine's steps.
real     waits in front of real encoder services of the demo model, at some rates.

The simulations share no formula with what they check. They are seeded, and run many copies of a
fleet side by side, so that what is printed repeats.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.encoder import Pictures
from chiasm.cli.child import PROGRAM as TIED_TO_PARENT
from chiasm.client import AsyncClient
from chiasm.sizing.answers import Answers, Engine, StepLine, highest_rate, pace
from chiasm.sizing.queueing import Load, OneQueue, Placed
from llm_service.engine.block_pool import BlockPool
from llm_service.engine.pricing import StepLimits, StepPrices
from llm_service.engine.scheduler import Scheduler

Floats = npt.NDArray[np.float64]
COPIES: Final = 100
BUSY: Final = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SERVERS: Final = (1, 2, 3, 4, 8, 16)
VARIATIONS: Final = (0.0, 1.0, 2.0)
GROUPS: Final = (1, 2, 4, 8)
# In services: of smaller waits the difference is taken in proportion to this.
LEAST_WAIT: Final = 0.1
LINES: Final = (
    StepLine(0.012, 0.00012),
    StepLine(0.004, 0.001),
    StepLine(0.02, 0.00002),
    StepLine(0.008, 0.00005),
)
# Prompt tokens, answer tokens, squared coefficient of variation of the prompts.
SHAPES: Final = ((50, 200, 0.0), (700, 100, 0.0), (700, 100, 1.0), (700, 20, 0.0), (1500, 300, 0.5))
MODEL: Final = Path(__file__).parents[1] / "demo_model" / "checkpoint"
# Width and height; decoding takes nearly all the time of such a picture with the demo model.
REAL_SIZE: Final = (800, 600)
SATURATING: Final = 200
# Encoders, pictures that come together, utilisation.
REAL_ROWS: Final = ((1, 1, 0.5), (1, 1, 0.7), (1, 4, 0.5), (2, 1, 0.4), (2, 4, 0.4))
_RING: Final = 2048


@dataclass(frozen=True)
class Cell:
    """One point of the grid; the service has a mean of 1 s."""

    busy: float
    servers: int
    variation: float
    group: int

    @property
    def load(self) -> Load:
        rate = self.busy * self.servers / self.group
        return Load(rate, (0.0,) * self.group + (1.0,), 1.0, self.variation)


@dataclass(frozen=True)
class Seen:
    """Seconds that were waited in a simulation."""

    mean: float
    p95: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    run(options)
    return 0


# ---- waits


def simulated(
    cell: Cell, *, placed: bool, members: int, copies: int = COPIES, seed: int = 0
) -> Seen:
    """`copies` fleets at once, `members` arrivals each; the first two fifths are left out."""
    random = np.random.default_rng((seed, cell.servers, cell.group, int(100 * cell.busy), placed))
    waits: list[Floats] = []
    fleet = _Pairs(cell, copies, random) if placed else _Line(cell, copies)
    steps = members // cell.group
    for step in range(steps):
        fleet.pass_time(random.exponential(cell.group / (cell.busy * cell.servers), copies))
        for _ in range(cell.group):
            waited = fleet.take(_service(random, cell.variation, copies))
            if step >= 0.4 * steps:
                waits.append(waited)
    every = np.concatenate(waits)
    return Seen(float(every.mean()), float(np.quantile(every, 0.95)))


def _service(random: np.random.Generator, variation: float, count: int) -> Floats:
    if variation == 0:
        return np.ones(count)
    return random.gamma(1 / variation, variation, count)


class _Line:
    """One queue: whoever comes takes the server that is free first."""

    def __init__(self, cell: Cell, copies: int) -> None:
        self._work = np.zeros((copies, cell.servers))
        self._each = np.arange(copies)

    def pass_time(self, seconds: Floats) -> None:
        self._work = np.maximum(self._work - seconds[:, None], 0)

    def take(self, service: Floats) -> Floats:
        at = self._work.argmin(axis=1)
        waited: Floats = self._work[self._each, at]
        self._work[self._each, at] += service
        return waited


class _Pairs:
    """Each goes to the one of two servers that has fewer outstanding: all that it was given and has
    not ended, the one under way counted whole."""

    def __init__(self, cell: Cell, copies: int, random: np.random.Generator) -> None:
        shape = (copies, cell.servers)
        self._servers, self._copies, self._random = cell.servers, copies, random
        self._now = np.zeros(copies)
        self._free_at, self._outstanding = np.zeros(shape), np.zeros(shape)
        self._head, self._tail = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._ends, self._sizes = np.zeros((*shape, _RING)), np.zeros((*shape, _RING))
        self._each = np.arange(copies)
        self._rows, self._columns = np.indices(shape)

    def pass_time(self, seconds: Floats) -> None:
        self._now = self._now + seconds
        while True:
            place = self._head % _RING
            ended = self._head < self._tail
            ended &= self._ends[self._rows, self._columns, place] <= self._now[:, None]
            if not ended.any():
                return
            gone = self._sizes[self._rows, self._columns, place]
            self._outstanding -= np.where(ended, gone, 0)
            self._head += ended

    def take(self, service: Floats) -> Floats:
        first = self._random.integers(0, self._servers, self._copies)
        at = first
        if self._servers > 1:
            second = (first + self._random.integers(1, self._servers, self._copies)) % self._servers
            fewer = (
                self._outstanding[self._each, second] < self._outstanding[self._each, first] - 1e-9
            )
            at = np.where(fewer, second, first)
        began = np.maximum(self._free_at[self._each, at], self._now)
        place = self._tail[self._each, at]
        if (place - self._head[self._each, at] >= _RING).any():
            raise RuntimeError("a queue outgrew the simulation's memory; make it larger")
        self._free_at[self._each, at] = began + service
        self._ends[self._each, at, place % _RING] = began + service
        self._sizes[self._each, at, place % _RING] = service
        self._outstanding[self._each, at] += service
        self._tail[self._each, at] += 1
        return began - self._now


# ---- answers


@dataclass(frozen=True)
class Ran:
    """What a simulated LLM service did; seconds are means."""

    running: float
    token_seconds: float
    first_token_seconds: float
    waiting_at_end: int


def run_engine(engine: Engine, answers: Answers, count: int, seed: int = 0) -> Ran:
    """The engine's own scheduler over a clock that is told how long each step takes.

    `count` answers, the first third left out. Prompts are of two lengths where they vary; answers
    are of a random length (exponential) around `answers.written`.
    """
    random = np.random.default_rng(seed)
    scheduler = _scheduler(engine, answers)
    arrivals = np.cumsum(random.exponential(1 / answers.rate, count))
    prompts = _prompts(random, answers, count)
    written = np.maximum(random.exponential(answers.written, count).round().astype(int), 1)
    left: dict[int, int] = {}
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    now, came, area, since = 0.0, 0, 0.0, 0.0
    while len(ended) < count and now < arrivals[-1]:
        while came < count and arrivals[came] <= now:
            scheduler.add(came, int(prompts[came]), int(prompts[came] + written[came]))
            left[came] = int(written[came])
            came += 1
        if not left:
            now = float(arrivals[came])
            continue
        step = scheduler.plan()
        seconds = engine.line.fixed + engine.line.each * step.token_count
        now += seconds
        scheduler.commit(step)
        if now > arrivals[count // 3]:
            area += seconds * sum(chunk.length == 1 and chunk.samples for chunk in step.chunks)
            since = since or now - seconds
        for chunk in step.chunks:
            if chunk.samples:
                first.setdefault(chunk.key, now)
                left[chunk.key] -= 1
                if not left[chunk.key]:
                    del left[chunk.key]
                    ended[chunk.key] = now
                    scheduler.remove(chunk.key)
    counted = [key for key in ended if key >= count // 3]
    paces = [((ended[key] - first[key]), written[key] - 1) for key in counted if written[key] > 1]
    return Ran(
        running=area / (now - since),
        token_seconds=sum(one for one, _ in paces) / sum(int(n) for _, n in paces),
        first_token_seconds=statistics.fmean(first[key] - arrivals[key] for key in counted),
        waiting_at_end=scheduler.waiting_count,
    )


def _scheduler(engine: Engine, answers: Answers) -> Scheduler:
    blocks = 1 << 20 if engine.kv_tokens == math.inf else int(engine.kv_tokens) // 16
    limits = StepLimits(StepPrices(engine.line.fixed, engine.line.each), engine.decode_stretch)
    return Scheduler(
        BlockPool(blocks + 1, 16),
        engine.step_token_budget,
        engine.max_running,
        limits=limits if engine.decode_stretch else None,
    )


def _prompts(random: np.random.Generator, answers: Answers, count: int) -> npt.NDArray[np.int64]:
    """Of two lengths, three quarters of the short one."""
    spread = math.sqrt(answers.prompt_variation)
    short, long = 1 - spread / math.sqrt(3), 1 + spread * math.sqrt(3)
    lengths = np.where(random.random(count) < 0.75, short, long) * answers.prompt
    return np.maximum(lengths.round().astype(np.int64), 1)


def report_answers(options: argparse.Namespace) -> None:
    """Errors over a grid of step lines, prompts, answers and utilisation, as ratios."""
    ratios: dict[tuple[float, str], list[float]] = {}
    for line, (prompt, written, variation), busy in product(LINES, SHAPES, options.busy):
        engine = Engine(line)
        rate = busy * highest_rate(engine, Answers(1, prompt, prompt, written, variation))[0]
        answers = Answers(rate, prompt, prompt, written, variation)
        said = pace(engine, answers)
        ran = [run_engine(engine, answers, options.answers, seed) for seed in range(2)]
        for name in ("running", "token_seconds", "first_token_seconds"):
            seen = statistics.fmean(getattr(one, name) for one in ran)
            ratios.setdefault((busy, name), []).append(abs(math.log(getattr(said, name) / seen)))
        print(f"{line.fixed:g}+{line.each:g} {prompt}/{written} {busy:.0%}", file=sys.stderr)
    print(
        "busy  figure               median  worst   (said over simulated, or the other way round)"
    )
    for (busy, name), logs in sorted(ratios.items()):
        middle, worst = math.exp(statistics.median(logs)), math.exp(max(logs))
        print(f"{busy:4.0%}  {name:19}  {middle:6.2f}  {worst:5.2f}")


# ---- reports


@dataclass(frozen=True)
class Error:
    """What was said less what was seen, over what was seen; services take 1 s."""

    cell: Cell
    mean: float
    p95: float


def report_waits(options: argparse.Namespace) -> None:
    """Errors over the grid, of both ways to queue."""
    for placed in (False, True):
        errors = []
        for cell in _grid(placed):
            members = options.members if cell.busy < 0.9 else 4 * options.members
            errors.append(_error(cell, placed, members))
            print(errors[-1], file=sys.stderr, flush=True)
        print("Placed at the less loaded of two" if placed else "One queue")
        print("busy   cells  mean: median  worst   p95: median  worst")
        for busy in BUSY:
            _print_errors(f"{busy:4.0%}", [one for one in errors if one.cell.busy == busy])
        _print_errors("from 50 %", [one for one in errors if one.cell.busy >= 0.5])


def _grid(placed: bool) -> Iterator[Cell]:
    for busy, servers, variation, group in product(BUSY, SERVERS, VARIATIONS, GROUPS):
        if not placed or servers > 1:
            yield Cell(busy, servers, variation, group)


def _error(cell: Cell, placed: bool, members: int) -> Error:
    said = (Placed if placed else OneQueue)(cell.load, cell.servers)
    seen = simulated(cell, placed=placed, members=members)
    # Of waits that are a small part of a service, proportions mean nothing.
    return Error(
        cell,
        (said.mean - seen.mean) / max(seen.mean, LEAST_WAIT),
        (said.quantile(0.95) - seen.p95) / max(seen.p95, 2 * LEAST_WAIT),
    )


def _print_errors(title: str, errors: Sequence[Error]) -> None:
    means, tails = [abs(one.mean) for one in errors], [abs(one.p95) for one in errors]
    print(
        f"{title}  {len(errors):4}  {statistics.median(means):12.1%}  {max(means):5.0%}"
        f"  {statistics.median(tails):11.1%}  {max(tails):5.0%}"
    )


# ---- real encoders


@dataclass(frozen=True)
class Kept:
    """One picture's times in an encoder, in seconds."""

    waited: float
    served: float


async def report_real(options: argparse.Namespace) -> None:
    """Two encoders with a decode thread each; decoding the pictures is nearly all their work."""
    files = Pictures(REAL_SIZE).some(options.pictures)
    print("encoders  group  busy  service  mean: said   measured  p95: said   measured")
    with ExitStack() as stack:
        ports = [stack.enter_context(_encoder(options.model)) for _ in range(2)]
        async with AsyncExitStack() as channels:
            clients = [
                await channels.enter_async_context(AsyncClient(encoder=f"127.0.0.1:{port}"))
                for port in ports
            ]
            for count, group, busy in REAL_ROWS:
                await _real_row(clients[:count], files, group, busy)


async def _real_row(
    clients: Sequence[AsyncClient], files: Sequence[bytes], group: int, busy: float
) -> None:
    seconds = await _saturated(clients, files[: SATURATING * len(clients)])
    rate = busy * len(clients) / seconds
    random = np.random.default_rng(group)
    outstanding = [0] * len(clients)
    tasks = []

    async def one(file: bytes) -> Kept:
        at = min(range(len(clients)), key=lambda place: outstanding[place])
        outstanding[at] += 1
        try:
            return await _encode(clients[at], file)
        finally:
            outstanding[at] -= 1

    due = time.monotonic()
    for begin in range(0, len(files), group):
        due += random.exponential(group / rate)
        await asyncio.sleep(max(due - time.monotonic(), 0))
        tasks += [asyncio.create_task(one(_renamed(file))) for file in files[begin : begin + group]]
    kept = (await asyncio.gather(*tasks))[len(tasks) // 10 :]
    served = [one.served for one in kept]
    variation = statistics.pvariance(served) / statistics.fmean(served) ** 2
    load = Load(rate / group, (0.0,) * group + (1.0,), seconds, variation)
    waited = sorted(one.waited for one in kept)
    said = Placed(load, len(clients))
    print(
        f"{len(clients):8}  {group:5}  {busy:4.0%}  {seconds * 1e3:4.1f} ms"
        f"  {said.mean * 1e3:11.1f} ms  {statistics.fmean(waited) * 1e3:6.1f} ms"
        f"  {said.quantile(0.95) * 1e3:6.1f} ms  {waited[int(0.95 * len(waited))] * 1e3:6.1f} ms",
        flush=True,
    )


async def _saturated(clients: Sequence[AsyncClient], files: Sequence[bytes]) -> float:
    """Seconds a picture on each of the encoders, all of which always have four in flight."""
    waiting = iter(files)

    async def one_after_another(client: AsyncClient) -> None:
        for file in waiting:
            await _encode(client, _renamed(file))

    began = time.monotonic()
    await asyncio.gather(*(one_after_another(client) for client in clients for _ in range(4)))
    return (time.monotonic() - began) * len(clients) / len(files)


async def _encode(client: AsyncClient, file: bytes) -> Kept:
    times = (await client.encode(file)).timings
    return Kept(times.queue_seconds, times.preprocess_seconds)


def _renamed(file: bytes) -> bytes:
    """The same JPEG with other bytes behind its end."""
    return file + os.urandom(8)


@contextmanager
def _encoder(model: Path) -> Iterator[int]:
    words = ["--model", str(model), "--port", "0", "--decode-workers", "1", "--torch-threads", "1"]
    child = subprocess.Popen(
        [
            sys.executable,
            *TIED_TO_PARENT,
            str(os.getpid()),
            "-m",
            "encoder_service",
            *words,
            "--log-level",
            "warning",
        ],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        yield int(ready["port"])
    finally:
        child.terminate()
        child.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    waits = commands.add_parser("waits")
    waits.set_defaults(run=report_waits)
    waits.add_argument("--members", type=int, default=5000, help="of each copy (%(default)d)")
    answers = commands.add_parser("answers")
    answers.set_defaults(run=report_answers)
    answers.add_argument("--answers", type=int, default=500, help="of a run (%(default)d)")
    answers.add_argument("--busy", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.85])
    real = commands.add_parser("real")
    real.set_defaults(run=lambda options: asyncio.run(report_real(options)))
    real.add_argument("--model", type=Path, default=MODEL, help="checkpoint (the demo model)")
    real.add_argument("--pictures", type=int, default=1500, help="of a row (%(default)d)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
