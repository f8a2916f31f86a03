"""Real service processes on free ports of loopback, for tests of the whole system.

    with start_encoder(model) as encoder, start_llm(model, "--encoders", encoder.target) as llm:
        with start_gateway(llm.port) as gateway:
            ...

Each is ready when its function returns: it printed its ready line. Leaving the `with` kills what
still runs. A test that wants an orderly end calls `terminate` and `wait` itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from chiasm.cli.child import PROGRAM as TIED_TO_PARENT

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "demo_model" / "checkpoint"
SAMPLES = ROOT / "demo_model" / "samples"
READY_SECONDS = 120.0


class Process:
    """A child process whose output is kept, and that dies with the test run."""

    def __init__(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.command = command
        self._process = subprocess.Popen(
            [sys.executable, *TIED_TO_PARENT, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            cwd=ROOT,
            env=service_environment(environment or {}),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def out(self) -> str:
        """Everything written to standard output so far."""
        return _content(self._stdout)

    def log(self) -> str:
        """Everything written to standard error so far."""
        return _content(self._stderr)

    def terminate(self) -> None:
        """SIGTERM: the service drains and ends."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self._process.kill()
        self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        """The exit code; negative for a signal. Raises TimeoutExpired."""
        return self._process.wait(timeout)

    def close(self) -> None:
        if self.alive:
            self.kill()
        self._stdout.close()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self.alive:
            print(f"--- {' '.join(self.command)}\n{self.log()[-4000:]}", file=sys.stderr)
        self.close()


class ServiceProcess(Process):
    """A service that has said it is ready.

    Attributes:
        port: where it listens.
        metrics_port: where its `/metrics` is; the gateway's own port for the gateway.
        health_port: of gRPC's health service in plaintext, if it has one.
    """

    def __init__(self, *command: str) -> None:
        super().__init__(*command)
        try:
            ready = self._await_ready()
        except BaseException:
            self.close()
            raise
        self.port: int = ready["port"]
        self.metrics_port: int = ready.get("metrics_port") or self.port
        self.health_port: int | None = ready.get("health_port")

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _await_ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            running = self.alive
            for line in self.out().splitlines(keepends=True):
                if line.endswith("\n") and (ready := _ready_line(line)) is not None:
                    return ready
            if not running:
                raise AssertionError(f"{self.command} ended early:\n{self.log()}")
            time.sleep(0.02)
        raise AssertionError(f"{self.command} was not ready in {READY_SECONDS} s:\n{self.log()}")


def start_encoder(model: Path, *flags: str) -> ServiceProcess:
    """An encoder service of `model`, with one torch thread and metrics unless `flags` say else."""
    return ServiceProcess("-m", "encoder_service", "--model", str(model), *_with_defaults(flags))


def start_llm(model: Path, *flags: str) -> ServiceProcess:
    """An LLM service of `model`; `--encoders` or `--vision` belong in `flags`."""
    return ServiceProcess("-m", "llm_service", "--model", str(model), *_with_defaults(flags))


def start_gateway(llm_port: int, *flags: str) -> ServiceProcess:
    """A gateway before the LLM service at `llm_port`."""
    llm = f"127.0.0.1:{llm_port}"
    return ServiceProcess("-m", "gateway", "--llm", llm, *_with_defaults(flags, _ALL))


_ALL = {"--port": "0", "--drain-seconds": "0"}
_MODELS = {**_ALL, "--metrics-port": "0", "--torch-threads": "1"}


def _with_defaults(flags: tuple[str, ...], defaults: Mapping[str, str] = _MODELS) -> list[str]:
    absent = {name: value for name, value in defaults.items() if name not in flags}
    return [*(word for pair in absent.items() for word in pair), *flags]


def service_environment(more: Mapping[str, str]) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, **more}


def _ready_line(line: str) -> dict[str, Any] | None:
    try:
        read = json.loads(line)
    except ValueError:
        return None
    return read if isinstance(read, dict) and read.get("event") == "ready" else None


def _content(file: IO[bytes]) -> str:
    # The child writes at an offset that is shared with this descriptor; pread moves none.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")
