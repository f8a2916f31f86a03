"""A real Valkey or Redis server on a socket of its own, to be killed, stopped and started again."""

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(
    BINARY is None, reason="neither valkey-server nor redis-server is installed"
)
_START_SECONDS = 20.0


class StoreServer:
    """The server; it keeps nothing on disk."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "store.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self, *flags: str) -> None:
        assert BINARY is not None
        self._socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                BINARY, "--port", "0", "--unixsocket", str(self._socket), "--save", "",
                "--appendonly", "no", "--dir", str(self._socket.parent), *flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while not self._socket.exists():
            assert self._process.poll() is None, "the store did not start"
            assert time.monotonic() < deadline, "the store was not ready"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL; connections break."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def hang(self) -> None:
        """It takes connections still and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def store_server(directory: Path, *flags: str) -> Iterator[StoreServer]:
    """A server that runs; killed at the end."""
    server = StoreServer(directory)
    server.start(*flags)
    try:
        yield server
    finally:
        server.kill()
