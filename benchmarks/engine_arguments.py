"""The command line of the engine's benchmark: flags, their help, and what they ask for."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.engine_burst import Mix
from benchmarks.engine_compare import Plan
from benchmarks.engine_drive import Cell
from benchmarks.engine_systems import Extra, Peer, cores

_CELLS = "0@1,0@8,0@32,1@1,1@8,1@32,4@1,4@8,4@32"
_QUICK_CELLS = "0@1,0@2,1@2"
_QUICK_MIX = Mix(streams=2, stream_tokens=48, bursts=2, burst_size=2, every=0.5, picture_tokens=4)
_QUICK_TOKENS = 8
_QUICK_MEGABYTES = 128
_LAYOUTS = ("shared", "split")
# Requests in a row that each of the loops sends, and the least in all, by pictures a request.
_IN_A_ROW = {0: (3, 6), 1: (2, 4), 4: (1, 2)}

Command = Callable[[argparse.Namespace], None]


def cells(options: argparse.Namespace) -> tuple[Cell, ...]:
    """The cells to measure, in their order."""
    wanted = options.cells or _pairs(_QUICK_CELLS if options.quick else _CELLS)
    return tuple(_cell(pictures, concurrency, options) for pictures, concurrency in wanted)


def _cell(pictures: int, concurrency: int, options: argparse.Namespace) -> Cell:
    row, least = _IN_A_ROW.get(pictures, (1, 2))
    row, least = (1, 2) if options.quick else (options.requests or row, options.requests or least)
    return Cell(pictures, concurrency, max(row * concurrency, least))


def mix_of(options: argparse.Namespace) -> Mix:
    """What runs in the burst."""
    if options.quick:
        return _QUICK_MIX
    return Mix(
        streams=options.streams,
        stream_tokens=options.stream_tokens,
        bursts=options.bursts,
        burst_size=options.burst_size,
        every=options.every,
        picture_tokens=options.picture_tokens,
    )


def new_tokens_of(options: argparse.Namespace) -> int:
    """Tokens of each answer."""
    return _QUICK_TOKENS if options.quick else int(options.new_tokens)


def megabytes(options: argparse.Namespace) -> int:
    """Size of the buffer that is read."""
    return _QUICK_MEGABYTES if options.quick else int(options.megabytes)


def plan_of(options: argparse.Namespace) -> Plan:
    """What `compare` and `tune` measure."""
    return Plan(
        model=options.model.resolve(),
        cells=cells(options),
        new_tokens=new_tokens_of(options),
        mix=None if options.no_burst else mix_of(options),
        rounds=1 if options.quick else options.rounds,
        kv_gib=options.kv_gib,
        layouts=(options.text_layout, options.picture_layout, options.burst_layout),
        extra=Extra(tuple(options.llm_flag), tuple(options.encoder_flag), dict(options.chiasm_env)),
        peer=_peer(options) if options.vllm_python else None,
        logs=options.logs,
    )


def _peer(options: argparse.Namespace) -> Peer:
    return Peer(
        options.vllm_python,
        options.vllm_bind,
        not options.vllm_compiled,
        tuple(options.vllm_flag),
        dict(options.vllm_env),
    )


def peers_to_try(options: argparse.Namespace, peer: Peer) -> Iterator[Peer]:
    """Ways to start vLLM, for `tune`."""
    for eager in (True, False) if options.compiled else (True,):
        for bind in options.binds.split():
            yield replace(peer, bind=bind, eager=eager)


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    try:
        words = [word.split("@") for word in text.split(",") if text != "none"]
        return tuple((int(pictures), int(concurrency)) for pictures, concurrency in words)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write pictures@concurrency,..., as in {_QUICK_CELLS}, or none"
        ) from None


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers, as in 1,8") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def parser_of(description: str | None, commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser; its options have `run`, the command's function."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (text, add) in _HELP.items():
        command = group.add_parser(name, help=text, description=text)
        command.set_defaults(run=commands[name])
        add(command)
    return parser


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, help="directory to write")
    command.add_argument(
        "--small", action="store_true", help="1.6 million parameters, to try things out"
    )


def _add_url(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", required=True, help="of the server, with or without /v1")
    command.add_argument("--model", required=True, help="the name that it serves")
    command.add_argument("--api-key", default="none", help="if the server wants one")
    command.add_argument(
        "--seed",
        default="0",
        help="other seeds give other prompts and pictures; change it to drive the same server "
        "again, or its caches help (%(default)s)",
    )
    _add_load(command)


def _add_load(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--cells",
        type=_pairs,
        help=f"pictures@concurrency,... or none ({_CELLS})",
    )
    add("--new-tokens", type=int, default=64, help="tokens of each answer (%(default)s)")
    add("--requests", type=int, help="requests in a row of each loop (3 of text, 2 with a picture)")
    add("--streams", type=int, default=4, help="burst: text streams (%(default)s)")
    add("--stream-tokens", type=int, default=512, help="burst: tokens of each (%(default)s)")
    add("--bursts", type=int, default=3, help="burst: how often pictures come (%(default)s)")
    add("--burst-size", type=int, default=16, help="burst: pictures at once (%(default)s)")
    add(
        "--every", type=float, default=5.0, help="burst: seconds from one to the next (%(default)s)"
    )
    add("--picture-tokens", type=int, default=64, help="burst: tokens of their answers")
    add("--json", type=Path, help="write all figures to this file")
    add("--quick", action="store_true", help="little of everything: shows that it works")


def _add_compare(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", type=Path, required=True, help="directory of the checkpoint")
    add("--rounds", type=int, default=3, help="rounds; who begins alternates (%(default)s)")
    add("--vllm-python", help="interpreter of vLLM's environment; without it Chiasm runs alone")
    add(
        "--vllm-bind",
        default="all",
        help="VLLM_CPU_OMP_THREADS_BIND; its own default, auto, leaves a core unused; all names "
        "every core (%(default)s)",
    )
    add("--vllm-compiled", action="store_true", help="leave --enforce-eager out")
    add("--vllm-flag", action="append", default=[], help="further word for vLLM, --vllm-flag=WORD")
    add(
        "--vllm-env",
        type=_variable,
        action="append",
        default=[],
        help="further variable for vLLM, NAME=VALUE",
    )
    add("--llm-flag", action="append", default=[], help="word for the LLM service, --llm-flag=WORD")
    add("--encoder-flag", action="append", default=[], help="word for the encoder service")
    add(
        "--chiasm-env",
        type=_variable,
        action="append",
        default=[],
        help="variable for Chiasm, NAME=VALUE",
    )
    for what, default in (("text", "shared"), ("picture", "shared"), ("burst", "split")):
        add(
            f"--{what}-layout",
            choices=_LAYOUTS,
            default=default,
            help=f"Chiasm's cores in {what} scenarios: all for both halves, or some for each "
            "(%(default)s)",
        )
    add("--kv-gib", type=int, default=2, help="keys and values of each server (%(default)s)")
    add("--no-burst", action="store_true", help="leave the burst out")
    add("--logs", type=Path, help="directory for the servers' logs; kept")
    _add_load(command)


def _add_memory(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--megabytes", type=int, default=1024, help="size of the buffer (%(default)s)")
    add("--threads", type=int, default=len(cores()), help="(%(default)s)")
    add("--quick", action="store_true", help="little of everything: shows that it works")


def _add_step(command: argparse.ArgumentParser) -> None:
    _add_memory(command)
    add = command.add_argument
    add("--model", type=Path, required=True, help="directory of the checkpoint")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add("--batches", type=_numbers, default=[1, 8, 32], help="sequences a step (1,8,32)")
    add("--context", type=int, default=96, help="tokens of each prompt (%(default)s)")
    add("--steps", type=int, default=64, help="new tokens of each sequence (%(default)s)")
    add("--kv-gib", type=int, default=1, help="keys and values (%(default)s)")
    add("--profile", type=int, metavar="BATCH", help="then profile this batch, by operator")
    add("--json", type=Path, help="write all figures to this file")


def _add_agree(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", type=Path, required=True, help="directory of the checkpoint")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
    add("--threads", type=int, default=len(cores()), help="(%(default)s)")
    add("--prompts", type=int, default=32, help="answers at once (%(default)s)")
    add("--context", type=int, default=96, help="tokens of the longest prompt (%(default)s)")
    add("--steps", type=int, default=64, help="tokens of each answer (%(default)s)")
    add("--json", type=Path, help="write all figures to this file")
    add("--quick", action="store_true", help="little of everything: shows that it works")


def _add_tune(command: argparse.ArgumentParser) -> None:
    _add_compare(command)
    command.add_argument(
        "--binds",
        default="auto all nobind",
        help="values of --vllm-bind to try, separated by spaces (%(default)s)",
    )
    command.add_argument("--compiled", action="store_true", help="try each compiled as well")


_HELP: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "checkpoint": ("build the checkpoint", _add_checkpoint),
    "compare": ("Chiasm against vLLM, in rounds", _add_compare),
    "drive": ("measure a URL in closed loops", _add_url),
    "burst": ("text streams of a URL while pictures arrive", _add_url),
    "tune": ("find vLLM's fastest way to start here", _add_tune),
    "bandwidth": ("how fast memory is read here", _add_memory),
    "step": ("the decode step against memory's limit", _add_step),
    "agree": ("answers beside others against answers alone", _add_agree),
}
