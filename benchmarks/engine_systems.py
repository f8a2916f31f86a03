"""Starts a server as processes of their own, waits until it is ready, and stops all of it."""

import contextlib
import http.client
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from chiasm.cli.plan import LOOPBACK, reserved_port

ROOT = Path(__file__).parents[1]
MODEL_NAME = "bench"
_POLL_SECONDS = 0.02
_READY_SECONDS = 900.0
_STOP_SECONDS = 30.0
_LOG_LINES = 25
_READY_LINE = b'"event": "ready"'

Layout = Literal["shared", "split"]


class ServerFailed(Exception):
    """A server ended or was not ready in time; the text holds the end of its log."""


@dataclass(frozen=True)
class Process:
    """One command.

    Attributes:
        cores: that it may run on; all where empty.
        environment: added to ours.
        says_ready: it prints a line of JSON with the event "ready".
    """

    name: str
    command: tuple[str, ...]
    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    says_ready: bool = False

    def shown(self) -> str:
        """As one would type it."""
        pinned = ("taskset", "-c", ",".join(map(str, self.cores))) if self.cores else ()
        words = [f"{key}={value}" for key, value in self.environment.items()]
        words += [*pinned, Path(self.command[0]).name, *map(shlex.quote, self.command[1:])]
        return " ".join(words)


@dataclass(frozen=True)
class System:
    """Processes that make one server together.

    It is ready when `ready_path` answers 200 and all that say so have said that they are.
    """

    name: str
    url: str
    ready_path: str
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Extra:
    """Further flags and variables, as given on the command line."""

    llm_flags: tuple[str, ...] = ()
    encoder_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """How vLLM is started. `bind` is its VLLM_CPU_OMP_THREADS_BIND."""

    python: str
    bind: str
    eager: bool
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


@contextmanager
def chiasm(model: Path, layout: Layout, kv_gib: int, extra: Extra) -> Iterator[System]:
    """Encoder, LLM service and gateway on ports that are kept free while open.

    "shared" lets both halves use all cores; "split" gives the decoder the first core and the
    encoder, with the gateway, the others.
    """
    with ExitStack() as held:
        encoder, llm, gateway = (held.enter_context(reserved_port()) for _ in range(3))
        everything = cores()
        first, rest = everything[:1], everything[1:] or everything
        ours, theirs = (first, rest) if layout == "split" else (everything, everything)
        pinned = layout == "split"
        llm_words = (
            *("llm_service", *_of(model, llm, ours), "--encoders", f"{LOOPBACK}:{encoder}"),
            *("--kv-bytes", str(kv_gib << 30), *extra.llm_flags),
        )
        encoder_words = ("encoder_service", *_of(model, encoder, theirs), *extra.encoder_flags)
        gateway_words = ("gateway", "--llm", f"{LOOPBACK}:{llm}", "--port", str(gateway), *_QUIET)
        yield System(
            "chiasm",
            f"http://{LOOPBACK}:{gateway}",
            "/ready",
            (
                _service("encoder", encoder_words, theirs, pinned, extra),
                _service("llm", llm_words, ours, pinned, extra),
                _service("gateway", gateway_words, theirs, pinned, extra),
            ),
        )


_QUIET = ("--log-level", "warning", "--drain-seconds", "0", "--grace-seconds", "0")


def _of(model: Path, port: int, used: Sequence[int]) -> tuple[str, ...]:
    return (
        *("--model", str(model), "--model-id", MODEL_NAME, "--port", str(port)),
        *("--dtype", "bfloat16", "--torch-threads", str(len(used)), *_QUIET),
    )


def _service(
    name: str, words: tuple[str, ...], used: tuple[int, ...], pinned: bool, extra: Extra
) -> Process:
    threads = {"OMP_NUM_THREADS": str(len(used)), "TOKENIZERS_PARALLELISM": "false"}
    command = (sys.executable, "-m", *words)
    environment = {**threads, "HF_HUB_OFFLINE": "1", **extra.environment}
    return Process(name, command, used if pinned else (), environment, says_ready=True)


@contextmanager
def vllm(model: Path, kv_gib: int, peer: Peer) -> Iterator[System]:
    """vLLM's own server on a port that is kept free while open."""
    with reserved_port() as port:
        command = (
            *(peer.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", MODEL_NAME, "--host", LOOPBACK, "--port", str(port)),
            *("--dtype", "bfloat16", "--max-model-len", "4096"),
            *("--limit-mm-per-prompt", '{"image":4}'),
            *(("--enforce-eager",) if peer.eager else ()),
            *peer.flags,
        )
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": _all_cores() if peer.bind == "all" else peer.bind,
            "VLLM_NO_USAGE_STATS": "1",
            **peer.environment,
        }
        process = Process("vllm", command, (), environment)
        yield System("vllm", f"http://{LOOPBACK}:{port}", "/health", (process,))


def _all_cores() -> str:
    return ",".join(map(str, cores()))


@dataclass(frozen=True)
class Ready:
    """A system that is ready: when it was started, by `time.monotonic`, and the seconds since."""

    began: float
    seconds: float


@contextmanager
def running(system: System, logs: Path | None = None) -> Iterator[Ready]:
    """Starts the system and waits until it is ready; stops it at the end. Raises ServerFailed."""
    with ExitStack() as stack:
        directory = logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        children = [stack.enter_context(_started(one, directory)) for one in system.processes]
        address = urlsplit(system.url)
        host, port = address.hostname or "", address.port or 80
        while not (
            _answers(host, port, system.ready_path) and all(child.said_ready for child in children)
        ):
            for child in children:
                child.check(time.monotonic() - began)
            time.sleep(_POLL_SECONDS)
        yield Ready(began, time.monotonic() - began)


@dataclass(frozen=True)
class _Child:
    """A started process; its own part of its log begins at `log_start`."""

    process: Process
    running: subprocess.Popen[bytes]
    log: Path
    log_start: int

    @property
    def said_ready(self) -> bool:
        return not self.process.says_ready or _READY_LINE in self._words()

    def check(self, seconds: float) -> None:
        """Raises ServerFailed if the process has ended, or `seconds` are too many."""
        code = self.running.poll()
        if code is not None or seconds > _READY_SECONDS:
            what = "was not ready in time" if code is None else f"ended with exit code {code}"
            lines = self._words().decode(errors="replace").splitlines()[-_LOG_LINES:]
            head = f"{self.process.name} {what}: {self.process.shown()}"
            raise ServerFailed("\n  ".join((head, *lines)))

    def _words(self) -> bytes:
        return self.log.read_bytes()[self.log_start :]


@contextmanager
def _started(process: Process, logs: Path) -> Iterator[_Child]:
    # A person's own thread count must not reach a server that is given its own.
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = logs / f"{process.name}.log"
    with path.open("ab") as log:
        log_start = log.tell()
        child = subprocess.Popen(
            process.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**inherited, **process.environment},
            start_new_session=True,
        )
    try:
        # It has not come to start threads yet; they take this over.
        if process.cores:
            os.sched_setaffinity(child.pid, process.cores)
        yield _Child(process, child, path, log_start)
    finally:
        _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever it started."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _answers(host: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
