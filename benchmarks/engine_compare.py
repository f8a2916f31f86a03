"""Chiasm and vLLM one after the other, in rounds, on the same checkpoint with the same cores."""

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.engine_burst import Mix, burst
from benchmarks.engine_client import AnswerFailed, Server, ask
from benchmarks.engine_drive import Cell, drive
from benchmarks.engine_load import Ask, bodies
from benchmarks.engine_report import (
    BURST,
    OURS,
    PEER,
    START,
    Measure,
    Round,
    flat,
    number,
    rows,
    table,
)
from benchmarks.engine_systems import (
    MODEL_NAME,
    Extra,
    Layout,
    Peer,
    ServerFailed,
    System,
    chiasm,
    running,
    vllm,
)

Say = Callable[[str], None]
_FIRST_PICTURE_SECONDS = 120.0
_RETRY_SECONDS = 0.05
_PEER_VERSIONS = (
    "import importlib.metadata as m, json, platform;"
    "print(json.dumps({'python': platform.python_version(),"
    "**{p: m.version(p) for p in ('vllm', 'torch', 'transformers')}}))"
)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        layouts: how Chiasm's halves share the cores in cells of text, in cells with pictures, and
            in the burst.
        peer: None measures Chiasm alone.
        mix: None leaves the burst out.
    """

    model: Path
    cells: tuple[Cell, ...]
    new_tokens: int
    mix: Mix | None
    rounds: int
    kv_gib: int
    layouts: tuple[Layout, Layout, Layout]
    extra: Extra
    peer: Peer | None
    logs: Path | None


@dataclass(frozen=True)
class _Part:
    """Scenarios that run on one start of a system."""

    cells: tuple[Cell, ...]
    mix: Mix | None
    layout: Layout


def compare(plan: Plan, say: Say) -> list[Round]:
    """All rounds; the system that begins alternates. Raises ServerFailed and AnswerFailed."""
    systems = (OURS, PEER) if plan.peer else (OURS,)
    done = []
    for turn in range(plan.rounds):
        for name in systems if turn % 2 == 0 else reversed(systems):
            began = time.monotonic()
            say(f"round {turn + 1} of {plan.rounds}, {name}")
            done.append(Round(name, turn, _round(plan, name, turn, say)))
            say(f"round {turn + 1} of {plan.rounds}, {name}: {time.monotonic() - began:.0f} s")
    return done


def parts(plan: Plan, system: str) -> list[_Part]:
    """The scenarios by start: Chiasm is laid out anew where a scenario wants it, vLLM never."""
    text = tuple(cell for cell in plan.cells if not cell.pictures)
    pictured = tuple(cell for cell in plan.cells if cell.pictures)
    if system == PEER:
        return [_Part((*text, *pictured), plan.mix, "shared")]
    wanted = [(text, None), (pictured, None), ((), plan.mix)]
    merged: dict[Layout, _Part] = {}
    for layout, (cells, mix) in zip(plan.layouts, wanted, strict=True):
        before = merged.get(layout, _Part((), None, layout))
        merged[layout] = _Part((*before.cells, *cells), before.mix or mix, layout)
    return [part for part in merged.values() if part.cells or part.mix]


def _round(plan: Plan, name: str, turn: int, say: Say) -> dict[Measure, float]:
    figures: dict[Measure, float] = {}
    for part in parts(plan, name):
        with _system(plan, name, part.layout) as system, running(system, plan.logs) as ready:
            server = Server(system.url)
            say(f"  {name} ({part.layout}) ready after {ready.seconds:.1f} s")
            to_picture = asyncio.run(_first_picture(server)) - ready.began
            figures.setdefault(Measure(START, "seconds_to_ready"), ready.seconds)
            figures.setdefault(Measure(START, "seconds_to_picture"), to_picture)
            for scenario, values in _scenarios(plan, part, server, f"round {turn}/{name}"):
                say(f"  {name} {scenario}: {_brief(values)}")
                figures |= {Measure(scenario, metric): value for metric, value in values.items()}
    return figures


async def _first_picture(server: Server) -> float:
    """The moment, by `time.monotonic`, at which a request with a picture was answered first.

    A server may say that it is ready a moment before its parts have found each other.
    """
    (body,) = bodies(Ask(MODEL_NAME, 1, 1), 1, "first")
    deadline = time.monotonic() + _FIRST_PICTURE_SECONDS
    while True:
        try:
            await ask(server, body)
        except AnswerFailed:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return time.monotonic()


def _scenarios(
    plan: Plan, part: _Part, server: Server, seed: str
) -> Iterator[tuple[str, dict[str, float]]]:
    for cell in part.cells:
        kind = Ask(MODEL_NAME, cell.pictures, plan.new_tokens)
        yield cell.name, asyncio.run(drive(server, kind, cell, seed)).as_dict()
    if part.mix:
        yield BURST, asdict(asyncio.run(burst(server, MODEL_NAME, part.mix, seed)))


@contextmanager
def _system(plan: Plan, name: str, layout: Layout) -> Iterator[System]:
    if name == PEER and plan.peer:
        with vllm(plan.model, plan.kv_gib, plan.peer) as system:
            yield system
    else:
        with chiasm(plan.model, layout, plan.kv_gib, plan.extra) as system:
            yield system


def _brief(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def tune_peer(plan: Plan, candidates: Iterable[Peer], say: Say) -> Peer:
    """The fastest of some ways to start vLLM, by the product of tokens/s over the plan's cells.

    A way that does not start is said and left out. Raises ServerFailed where none starts.
    """
    best: tuple[float, Peer] | None = None
    for peer in candidates:
        words = f"bind {peer.bind}, {'eager' if peer.eager else 'compiled'}"
        try:
            score = _score(plan, peer, say)
        except ServerFailed as error:
            say(f"{words}: does not start: {error}")
            continue
        say(f"{words}: score {score:.4g}")
        if best is None or score > best[0]:
            best = (score, peer)
    if best is None:
        raise ServerFailed("no way to start vLLM works")
    return best[1]


def _score(plan: Plan, peer: Peer, say: Say) -> float:
    score = 1.0
    with vllm(plan.model, plan.kv_gib, peer) as system, running(system, plan.logs) as ready:
        say(f"  ready after {ready.seconds:.1f} s")
        part = _Part(plan.cells, None, "shared")
        for scenario, values in _scenarios(plan, part, Server(system.url), "tune"):
            say(f"  {scenario}: {_brief(values)}")
            score *= values["tokens_per_second"]
    return score


def report(plan: Plan, rounds: Sequence[Round]) -> str:
    """The table for a person, with the machine and the commands."""
    machine = "\n".join(f"- {name}: {value}" for name, value in described(plan).items())
    return f"{table(rows(rounds))}\n\n{machine}"


def write_json(path: Path, plan: Plan, rounds: Sequence[Round]) -> None:
    """All rounds, the rows of the table, and what they were measured on."""
    lines = [
        {**asdict(row.measure), "chiasm": row.ours, "vllm": row.peer, "ratio": row.ratio}
        | {"target": str(row.target or ""), "verdict": row.verdict}
        for row in rows(rounds)
    ]
    content = {"machine": described(plan), "rounds": list(flat(rounds)), "rows": lines}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def described(plan: Plan) -> dict[str, str]:
    """The machine, the versions and the commands."""
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "Chiasm": _versions({name: version(name) for name in ("chiasm", "torch", "transformers")}),
        "Python": platform.python_version(),
    }
    if plan.peer:
        asked = subprocess.run(
            [plan.peer.python, "-c", _PEER_VERSIONS], capture_output=True, text=True, check=True
        )
        found["vLLM"] = _versions(json.loads(asked.stdout.splitlines()[-1]))
    return found | dict(_commands(plan))


def _commands(plan: Plan) -> Iterator[tuple[str, str]]:
    for name in (OURS, PEER) if plan.peer else (OURS,):
        for layout in dict.fromkeys(part.layout for part in parts(plan, name)):
            with _system(plan, name, layout) as system:
                for process in system.processes:
                    shown = process.shown().replace(str(plan.model), "CHECKPOINT")
                    yield f"{name} ({layout}) {process.name}", f"`{shown}`"


def _versions(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def to_stderr(text: str) -> None:
    """One line of progress."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
