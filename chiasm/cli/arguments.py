"""The command line: every command, its flags and their help."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chiasm
from chiasm.cli import mixes
from chiasm.cli.samples import DEMO_MODEL_ID

_Command = Callable[[argparse.Namespace], int]
_DTYPES = ("float32", "bfloat16", "float16")
_LEVELS = ("debug", "info", "warning", "error")


def read(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of one command, with `command`, the function that runs it."""
    parser = argparse.ArgumentParser(
        prog="chiasm",
        description="Serve vision-language models with the eye and the brain in separate "
        "processes.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(commands)
    _add_demo(commands)
    _add_compare(commands)
    _add_models(commands)
    _add_key(commands)
    _add_plan(commands)
    _add(commands, "version", _version, "print the versions of Chiasm and of what it runs on")
    return parser.parse_args(arguments)


def _add_up(commands: Any) -> None:
    up = _add(
        commands,
        "up",
        _up,
        "start encoders, LLM service and gateway, and keep them running",
        "Starts every part as a process on this machine, waits until all are healthy, and stops "
        "them in order on Ctrl-C (a second Ctrl-C stops at once). If a part dies, says which and "
        "why, stops the others and exits with 1, unless --restart is given. All parts end when "
        "this process does.",
    )
    _add_system(up)
    up.add_argument("--host", default="127.0.0.1", help="address of the gateway (%(default)s)")
    up.add_argument("--port", type=_port, default=8000, help="port of the gateway (%(default)s)")
    up.add_argument("--llm-port", type=_port, default=0, help="gRPC port of the LLM service (free)")
    up.add_argument(
        "--encoder-port",
        type=_port,
        default=0,
        help="gRPC port of the first encoder, the others follow it (free ones)",
    )
    up.add_argument("--encoders", type=_positive, help="number of encoders, at least 1 (1)")
    up.add_argument(
        "--vision",
        choices=("remote", "local", "none"),
        default="remote",
        help="who encodes raw pictures: encoder processes, the LLM process, nobody (%(default)s)",
    )
    up.add_argument("--dtype", choices=_DTYPES, default="float32", help="(%(default)s)")
    up.add_argument(
        "--restart",
        action="store_true",
        help="start a part again that dies once all were healthy: after 0.5 s, then ever later up "
        "to 30 s while it keeps dying; one that refuses its settings (exit code 2) still ends all",
    )


def _add_demo(commands: Any) -> None:
    demo = _add(
        commands,
        "demo",
        _demo,
        "start everything, ask about shipped pictures in two ways, stop",
        "Asks each question twice over HTTP: with the picture, and with the picture's embedding "
        "that an encoder gave beforehand. Exits with 0 only if both answers agree every time.",
    )
    _add_system(demo)


def _add_compare(commands: Any) -> None:
    compare = _add(
        commands,
        "compare",
        _compare,
        "check that all ways into a running system give the same text",
        "Asks the same conversations, greedily, as raw pictures, as embeddings and mixed, over "
        "HTTP and gRPC. With --model also through a local tower and with transformers' own "
        "generate on the whole model. Exits with 0 only if every text is the same.",
    )
    compare.add_argument("--url", default="http://127.0.0.1:8000", help="gateway (%(default)s)")
    compare.add_argument("--llm", default="127.0.0.1:50051", help="LLM service (%(default)s)")
    compare.add_argument("--encoder", default="127.0.0.1:50061", help="encoder (%(default)s)")
    compare.add_argument(
        "--model", type=_directory, help="checkpoint directory, for the local ways"
    )
    compare.add_argument(
        "--pictures",
        type=_existing,
        nargs="+",
        help="picture files, or one directory of them (the demo model's samples)",
    )
    compare.add_argument(
        "--questions", type=_existing, help="text file, one question a line (a built-in list)"
    )
    compare.add_argument("--max-tokens", type=_positive, default=32, help="an answer (%(default)s)")
    compare.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="of the local ways; the running system's own (%(default)s)",
    )
    compare.add_argument(
        "--timeout", type=_seconds, default=60.0, help="seconds, of each answer (%(default)s)"
    )
    _add_mtls(compare)


def _add_mtls(parser: argparse.ArgumentParser) -> None:
    for name, what in {
        "cert": "certificate to show to the services (PEM), where they want mutual TLS",
        "key": "its key (PEM)",
        "ca": "authorities of the services' certificates (PEM)",
    }.items():
        parser.add_argument(f"--mtls-{name}", type=Path, help=f"{what} (plaintext)")
    for name, service in {"llm": "LLM service", "encoder": "encoder"}.items():
        parser.add_argument(
            f"--mtls-{name}", default="", help=f"DNS name in the {service}'s certificate"
        )


def _add_models(commands: Any) -> None:
    models = _add(
        commands,
        "models",
        _models,
        "list the model families that are served and what each takes",
        "Lists the model families whose split is tested: the model_type of their config.json, what "
        "an embedding must come with, options of a request that count, and how the decoder runs.",
    )
    models.add_argument(
        "--markdown", action="store_true", help="as the page docs/models.md of the documentation"
    )


def _add_key(commands: Any) -> None:
    summary = "make an API key for the gateway"
    key = commands.add_parser("key", help=summary, description=f"{summary.capitalize()}.")
    actions = key.add_subparsers(title="commands", metavar="COMMAND", required=True)
    new = _add(
        actions,
        "new",
        _key,
        "make a key and the entry by which the gateway knows it",
        "Shows a random key once, and the entry with its SHA-256 for the gateway's --keys-file "
        "(docs/gateway-keys.md). With --file the entry is appended there, and a running gateway "
        "takes it up within a second or two.",
    )
    new.add_argument("--name", type=_key_name, required=True, help="stands in logs; each its own")
    new.add_argument(
        "--tenant", type=_key_name, required=True, help="whose pictures and caches it may use"
    )
    new.add_argument("--file", type=Path, help="keys file to append to, made if there is none")
    new.add_argument("--requests-per-minute", type=_positive, help="(no limit)")
    new.add_argument("--tokens-per-minute", type=_positive, help="(no limit)")
    new.add_argument("--concurrent-requests", type=_positive, help="(no limit)")
    new.add_argument("--days", type=_days, help="days until it expires (never)")


def _add_plan(commands: Any) -> None:
    plan = _add(
        commands,
        "plan",
        _plan,
        "tell how many encoders and LLM services a load needs",
        "Tells from a load and from measured rates how many encoders and LLM services are needed, "
        "how long pictures wait, and what one less would do (docs/operations.md). A MIX is one "
        "value, or VALUE:SHARE,VALUE:SHARE,... Exits with 1 if no number meets the targets.",
    )
    load = plan.add_argument_group("the load")
    load.add_argument("--requests", type=mixes.within(1e-6, 1e6), required=True, help="a second")
    load.add_argument(
        "--pictures",
        type=mixes.pictures,
        default=(0.0, 1.0),
        metavar="MIX",
        help="of a request: a mean, or a mix of whole numbers (1)",
    )
    load.add_argument("--rows", type=mixes.rows, metavar="MIX", help="feature rows of a picture")
    load.add_argument(
        "--sizes", type=mixes.sizes, metavar="MIX", help="WIDTHxHEIGHT instead, with --model"
    )
    for name, value, what in (
        ("text-tokens", 100.0, "of a prompt, pictures not counted"),
        ("answer-tokens", 100.0, "that an answer has on average"),
    ):
        check = mixes.within(0 if name == "text-tokens" else 1, 1e7)
        load.add_argument(f"--{name}", type=check, default=value, help=f"{what} (%(default)g)")
    for name, what in {
        "cache-hits": "of pictures that the LLM service's cache has",
        "encoder-cache-hits": "of the others that an encoder's cache has",
        "prefix-hits": "of prompt tokens that the prefix cache has",
    }.items():
        load.add_argument(f"--{name}", type=mixes.share, default=0.0, help=f"share {what} (0)")
    _add_plan_rates(plan)
    _add_plan_limits(plan)
    plan.add_argument("--json", action="store_true", help="the plan as JSON, in seconds and bytes")


def _add_plan_rates(plan: argparse.ArgumentParser) -> None:
    rates = plan.add_argument_group("how long work takes, in seconds")
    for name, what in {
        "encode-seconds": "of a picture on one encoder under load",
        "encode-seconds-a-row": "and for each of its rows (0)",
        "encode-variation": "variance over squared mean, of pictures of one size (0)",
        "step-seconds": "of a step of the LLM service",
        "step-seconds-a-token": "and for each token in it (0)",
    }.items():
        check = mixes.within(0, 10) if name == "encode-variation" else mixes.seconds
        rates.add_argument(f"--{name}", type=check, help=what)
    rates.add_argument(
        "--measure",
        action="store_true",
        help="measure those that are not given, by some pictures and answers; the services should "
        "have nothing else to do",
    )
    rates.add_argument("--encoder", help="HOST:PORT of an encoder to measure")
    rates.add_argument("--llm", help="HOST:PORT of an LLM service to measure")
    rates.add_argument(
        "--timeout", type=_seconds, default=120.0, help="of each measuring call (%(default)g)"
    )
    _add_mtls(plan)


def _add_plan_limits(plan: argparse.ArgumentParser) -> None:
    targets = plan.add_argument_group("targets, times in seconds")
    targets.add_argument(
        "--utilisation", type=mixes.utilisation, default=0.7, help="the highest (%(default)g)"
    )
    targets.add_argument(
        "--encode-wait",
        type=mixes.wait,
        default=1.0,
        help="before the tower, of 95 %% of the pictures (%(default)g)",
    )
    targets.add_argument("--token-seconds", type=mixes.wait, help="mean, token to token (any)")
    targets.add_argument(
        "--first-token-seconds", type=mixes.wait, help="mean, in the engine alone (any)"
    )
    model = plan.add_argument_group("the model and the LLM service's settings")
    model.add_argument("--model", type=_directory, help="checkpoint directory: sizes in bytes")
    model.add_argument("--dtype", choices=_DTYPES, default="float32", help="(%(default)s)")
    model.add_argument("--width", type=_positive, help="elements of a feature row (the model's)")
    model.add_argument("--kv-bytes-a-token", type=_positive, help="of one token (the model's)")
    model.add_argument("--kv-bytes", type=_positive, help="of one LLM service (no limit)")
    model.add_argument("--max-running", type=_positive, default=64, help="(%(default)d)")
    model.add_argument("--step-token-budget", type=_positive, default=512, help="(%(default)d)")
    model.add_argument(
        "--decode-stretch", type=mixes.within(0, 1000), default=1.5, help="(%(default)g)"
    )


def _add_system(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=_directory, help="checkpoint directory (the demo model)")
    parser.add_argument(
        "--model-id",
        default="",
        help=f"name under which it is served ({DEMO_MODEL_ID}, or the directory's name)",
    )
    parser.add_argument(
        "--ready-timeout",
        type=_seconds,
        default=300.0,
        help="seconds until all parts must be healthy (%(default)s)",
    )
    parser.add_argument(
        "--stop-timeout",
        type=_seconds,
        default=60.0,
        help="seconds that a part has to end its answers before it is killed (%(default)s)",
    )
    parser.add_argument("--log-dir", type=Path, help="also write each part's log to a file there")
    parser.add_argument(
        "--log-level", choices=_LEVELS, default="warning", help="of all parts (%(default)s)"
    )


def _add(
    commands: Any, name: str, command: _Command, summary: str, description: str = ""
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description or f"{summary.capitalize()}."
    )
    parser.set_defaults(command=command)
    return parser


def _up(options: argparse.Namespace) -> int:
    from chiasm.cli.up import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    from chiasm.cli.demo import run

    return run(options)


def _compare(options: argparse.Namespace) -> int:
    from chiasm.cli.compare import run

    return run(options)


def _models(options: argparse.Namespace) -> int:
    from chiasm.cli.models import run

    return run(options)


def _key(options: argparse.Namespace) -> int:
    from chiasm.cli.key import run

    return run(options)


def _plan(options: argparse.Namespace) -> int:
    from chiasm.cli.fleet_plan import run

    return run(options)


def _version(_: argparse.Namespace) -> int:
    import platform
    from importlib import metadata

    print(f"chiasm {chiasm.__version__}")
    print(f"python {platform.python_version()}")
    for package in ("grpcio", "torch", "transformers"):
        try:
            print(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            print(package, "is not installed")
    return 0


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError("a port is 0 to 65535; 0 takes a free one")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _days(text: str) -> int:
    number = _positive(text)
    if number > 36_500:
        raise argparse.ArgumentTypeError("at most 36500")
    return number


def _key_name(text: str) -> str:
    from chiasm import api_keys

    if not api_keys.NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(api_keys.NAME_FORM)
    return text


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("a number of seconds above 0")
    return number


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return path


def _directory(text: str) -> Path:
    path = _existing(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return path
