"""`python -m benchmarks.engine COMMAND`: the engine against vLLM and against the machine's limit.

checkpoint  builds a LLaVA-shaped checkpoint with random weights
compare     runs Chiasm and vLLM one after the other, in rounds, and prints the ratios
drive       measures any OpenAI-compatible URL in closed loops
burst       measures how long text streams of such a URL wait while pictures arrive
tune        finds vLLM's fastest way to start on this machine, so that `compare` is fair
bandwidth   measures how fast this machine reads memory
step        measures the embedded engine's decode step against that
agree       counts how often an answer beside others differs from the same answer alone
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.engine_arguments import (
    cells,
    megabytes,
    mix_of,
    new_tokens_of,
    parser_of,
    peers_to_try,
    plan_of,
)
from benchmarks.engine_burst import burst
from benchmarks.engine_client import AnswerFailed, Server
from benchmarks.engine_compare import compare, report, to_stderr, tune_peer, write_json
from benchmarks.engine_drive import Figures, drive
from benchmarks.engine_load import Ask
from benchmarks.engine_report import number, scenario_title
from benchmarks.engine_systems import ServerFailed

_OPS_SHOWN = 25


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    options = parser_of(__doc__, _COMMANDS).parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except (AnswerFailed, ServerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Raises where the program stands, so that what it started is stopped.
    raise SystemExit(128 + number)


def _checkpoint(options: argparse.Namespace) -> None:
    # torch and transformers take seconds to load, which the other commands do not need.
    from benchmarks.engine_checkpoint import FULL, SMALL, build

    to_stderr("building; training the tokenizer takes half a minute")
    count = build(options.out, SMALL if options.small else FULL)
    print(f"{options.out}: {count:,} parameters")


def _drive(options: argparse.Namespace) -> None:
    server = Server(options.url, options.api_key)
    found: dict[str, Figures] = {}
    for cell in cells(options):
        kind = Ask(options.model, cell.pictures, new_tokens_of(options))
        to_stderr(f"{scenario_title(cell.name)}: {cell.requests} requests")
        found[cell.name] = asyncio.run(drive(server, kind, cell, options.seed))
    print(_drive_table(found))
    if options.json:
        _write(options.json, {name: figures.as_dict() for name, figures in found.items()})


def _drive_table(found: dict[str, Figures]) -> str:
    head = (
        *("scenario", "requests/s", "tokens/s", "TTFT p50, ms", "TTFT p99, ms"),
        *(
            "inter-token p50, ms",
            "inter-token p99, ms",
            "prompt tokens",
            "chunks a token",
            "client's CPU",
        ),
    )
    lines = [head, ("---", *["---:"] * (len(head) - 1))]
    for name, one in found.items():
        shown = (
            *(one.requests_per_second, one.tokens_per_second, one.first_p50, one.first_p99),
            *(one.gap_p50, one.gap_p99, one.prompt_tokens, one.pieces_per_token, one.client_cpu),
        )
        lines.append((scenario_title(name), *map(number, shown)))
    return _markdown(lines)


def _burst(options: argparse.Namespace) -> None:
    server, mix = Server(options.url, options.api_key), mix_of(options)
    to_stderr(mix.name)
    found = asdict(asyncio.run(burst(server, options.model, mix, options.seed)))
    found["burst p99 / calm p99"] = found["burst_gap_p99"] / found["calm_gap_p99"]
    print(_markdown([("figure", ""), ("---", "---:"), *((k, number(v)) for k, v in found.items())]))
    if options.json:
        _write(options.json, found)


def _compare(options: argparse.Namespace) -> None:
    plan = plan_of(options)
    rounds = compare(plan, to_stderr)
    print(report(plan, rounds))
    if options.json:
        write_json(options.json, plan, rounds)


def _tune(options: argparse.Namespace) -> None:
    plan = plan_of(options)
    if plan.peer is None:
        raise ServerFailed("tune needs --vllm-python")
    best = tune_peer(plan, peers_to_try(options, plan.peer), to_stderr)
    print(f"fastest: --vllm-bind {best.bind}{'' if best.eager else ' --vllm-compiled'}")


def _bandwidth(options: argparse.Namespace) -> None:
    from benchmarks.engine_step import bandwidth

    found = bandwidth(megabytes(options), options.threads)
    lines = [("way of reading", "GB/s"), ("---", "---:")]
    lines += [(way, number(rate)) for way, rate in found.ways.items()]
    print(f"{megabytes(options)} MB, {options.threads} threads\n\n{_markdown(lines)}")


def _step(options: argparse.Namespace) -> None:
    from benchmarks import engine_step

    batches = options.batches[: 2 if options.quick else None]
    new_tokens = 24 if options.quick else options.steps
    to_stderr("loading")
    with engine_step.opened(
        options.model, options.dtype, options.threads, options.kv_gib
    ) as engine:
        print(f"weights read a step: {engine.weight_bytes / 1e6:.1f} MB\n")
        found = []
        for batch in batches:
            to_stderr(f"batch {batch}")
            # Anew each time, for a shared machine's speed changes.
            read = engine_step.bandwidth(megabytes(options), options.threads)
            engine.steps(batch, options.context, 8)
            seconds = engine.steps(batch, options.context, new_tokens)
            found.append(engine_step.step_times(seconds, batch, engine.weight_bytes, read.best))
        print(_step_table(found))
        if options.profile:
            _print_profile(engine.profile(options.profile, options.context, new_tokens))
    if options.json:
        steps = [asdict(one) | {"of_limit": one.of_limit} for one in found]
        _write(options.json, {"weight_bytes": engine.weight_bytes, "steps": steps})


def _step_table(found: Iterable[Any]) -> str:
    head = (
        *("batch", "median, ms", "p10, ms", "GB/s", "limit, ms", "of the limit", "steps"),
        "tokens/s",
    )
    lines: list[tuple[str, ...]] = [head, ("---:",) * len(head)]
    for one in found:
        shown = (one.median, one.p10, one.gigabytes, one.limit, one.of_limit, one.steps)
        rate = 1000 * one.batch / one.median
        lines.append((str(one.batch), *map(number, shown), number(rate)))
    return _markdown(lines)


def _print_profile(profile: Any) -> None:
    lines = [("operator", "us a step", "calls a step", "share"), ("---", *["---:"] * 3)]
    whole = profile.step_microseconds
    for op in profile.ops[:_OPS_SHOWN]:
        share = f"{op.microseconds / whole:.1%}"
        lines.append((op.name, number(op.microseconds), number(op.calls), share))
    rest = sum(op.microseconds for op in profile.ops[_OPS_SHOWN:])
    lines.append(("all other operators", number(rest), "", f"{rest / whole:.1%}"))
    outside = f"{profile.outside / whole:.1%}"
    lines.append(
        ("no operator (Python, own kernels, profiler)", number(profile.outside), "", outside)
    )
    print(f"\none step under the profiler: {whole:.0f} us\n\n{_markdown(lines)}")


def _agree(options: argparse.Namespace) -> None:
    from benchmarks.engine_agree import agreements

    count, new_tokens = (4, 8) if options.quick else (options.prompts, options.steps)
    lines: list[tuple[str, ...]] = [
        ("layers", "answers", "that differ", "share", "tokens alike", "first difference at token"),
        ("---", *["---:"] * 5),
    ]
    found = []
    for one in agreements(
        options.model, options.dtype, options.threads, count, options.context, new_tokens
    ):
        found.append(one)
        places = ", ".join(map(str, one.places))
        lines.append(
            (one.layers, str(one.answers), str(len(one.places)), f"{one.share:.1%}",
             f"{one.alike} of {one.tokens}", places or "none")
        )  # fmt: skip
    print(f"{options.dtype}, greedy, {new_tokens} tokens an answer\n\n{_markdown(lines)}")
    if options.json:
        _write(options.json, [asdict(one) for one in found])


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_COMMANDS = {
    "checkpoint": _checkpoint,
    "compare": _compare,
    "drive": _drive,
    "burst": _burst,
    "tune": _tune,
    "bandwidth": _bandwidth,
    "step": _step,
    "agree": _agree,
}


if __name__ == "__main__":
    raise SystemExit(main())
