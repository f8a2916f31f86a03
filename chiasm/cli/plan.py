"""What to start: the processes of a system, their ports and flags. Starts nothing itself."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LOOPBACK = "127.0.0.1"
Vision = Literal["remote", "local", "none"]


class PlanError(Exception):
    """A system that cannot be started as asked; the text says what to change."""


@dataclass(frozen=True)
class Wanted:
    """What a person asked for. A port of 0 takes a free one."""

    model: Path
    model_id: str
    host: str = LOOPBACK
    port: int = 0
    llm_port: int = 0
    encoder_port: int = 0
    encoders: int = 1
    vision: Vision = "remote"
    dtype: str = "float32"
    log_level: str = "warning"

    @property
    def encoder_count(self) -> int:
        return self.encoders if self.vision == "remote" else 0


@dataclass(frozen=True)
class Command:
    """One process: `python -m module flags`. `rank` is its place in the order of a stop."""

    name: str
    module: str
    flags: tuple[str, ...]
    target: str
    rank: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """All processes of a system, and where its parts are reached."""

    commands: tuple[Command, ...]
    url: str
    llm: str
    encoders: tuple[str, ...]


@contextmanager
def reserved(wanted: Wanted, cores: int | None = None) -> Iterator[Plan]:
    """The plan, its ports kept from other programs while open. Raises PlanError."""
    with ExitStack() as held:
        port = _hold(held, wanted.host, wanted.port, "--port")
        llm_port = _hold(held, LOOPBACK, wanted.llm_port, "--llm-port")
        encoder_ports = [
            _hold(held, LOOPBACK, wanted.encoder_port and wanted.encoder_port + i, "--encoder-port")
            for i in range(wanted.encoder_count)
        ]
        yield planned(wanted, port, llm_port, encoder_ports, cores or usable_cores())


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of loopback, kept from other programs while open."""
    with ExitStack() as held:
        yield _hold(held, LOOPBACK, 0, "")


def local_llm(wanted: Wanted, port: int) -> Command:
    """An LLM service by itself, with the cores of the machine."""
    return _llm(wanted, port, (), usable_cores())


def planned(
    wanted: Wanted, port: int, llm_port: int, encoder_ports: Sequence[int], cores: int
) -> Plan:
    """The plan on given ports."""
    llm_threads, encoder_threads = shares(cores, len(encoder_ports))
    encoders = tuple(f"{LOOPBACK}:{number}" for number in encoder_ports)
    llm = f"{LOOPBACK}:{llm_port}"
    commands = [_gateway(wanted, port, llm), _llm(wanted, llm_port, encoders, llm_threads)]
    for place, number in enumerate(encoder_ports, start=1):
        name = "encoder" if len(encoder_ports) == 1 else f"encoder {place}"
        commands.append(_encoder(wanted, name, number, encoder_threads))
    return Plan(tuple(commands), f"http://{_reachable(wanted.host)}:{port}", llm, encoders)


def usable_cores() -> int:
    """Cores that this process may use, at most OMP_NUM_THREADS where that is set."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bound = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(affinity or 1, int(bound) if bound.isdecimal() else affinity or 1))


def shares(cores: int, encoder_count: int) -> tuple[int, int]:
    """Torch threads of the LLM service and of each encoder: half of the cores to each side."""
    if encoder_count == 0:
        return max(1, cores), 1
    llm = max(1, cores // 2)
    return llm, max(1, (cores - llm) // encoder_count)


def _gateway(wanted: Wanted, port: int, llm: str) -> Command:
    flags = ("--llm", llm, "--host", wanted.host, "--port", str(port))
    target = f"{_reachable(wanted.host)}:{port}"
    return Command("gateway", "gateway", (*flags, *_common(wanted)), target, rank=0)


def _llm(wanted: Wanted, port: int, encoders: Sequence[str], threads: int) -> Command:
    remote = ("--encoders", ",".join(encoders)) if encoders else ()
    return Command(
        "LLM service",
        "llm_service",
        (*_model(wanted, port, threads), "--vision", wanted.vision, *remote),
        f"{LOOPBACK}:{port}",
        rank=1,
        environment=_threads(threads),
    )


def _encoder(wanted: Wanted, name: str, port: int, threads: int) -> Command:
    return Command(
        name,
        "encoder_service",
        (*_model(wanted, port, threads), "--encoder-name", name.replace(" ", "-")),
        f"{LOOPBACK}:{port}",
        rank=2,
        environment=_threads(threads),
    )


def _model(wanted: Wanted, port: int, threads: int) -> tuple[str, ...]:
    return (
        *("--model", str(wanted.model), "--model-id", wanted.model_id, "--dtype", wanted.dtype),
        *("--host", LOOPBACK, "--port", str(port), "--torch-threads", str(threads)),
        *_common(wanted),
    )


def _common(wanted: Wanted) -> tuple[str, ...]:
    # Nobody balances between parts of one machine: no time is needed for callers to notice a stop.
    return ("--log-level", wanted.log_level, "--drain-seconds", "0")


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}


def _reachable(host: str) -> str:
    return LOOPBACK if host in {"0.0.0.0", "::", ""} else host


def _hold(held: ExitStack, host: str, port: int, flag: str) -> int:
    """Binds a port without listening: others cannot take it, a child that reuses addresses can."""
    if port > 65535:
        raise PlanError(f"{flag} leaves no room for all encoders below port 65536; choose a lower")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
    except OSError as error:
        raise PlanError(_why_not(host, port, flag, error)) from error
    number: int = holder.getsockname()[1]
    return number


def _why_not(host: str, port: int, flag: str, error: OSError) -> str:
    import errno

    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; choose another with {flag} (0 takes a free one)"
    return f"cannot listen on port {port} of {host}: {error.strerror}"
