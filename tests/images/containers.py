"""Containers of the images as an operator would harden them: no rights, nothing to write to."""

import json
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.images import build

CHECKPOINT: Final = Path(__file__).parents[2] / "demo_model" / "checkpoint"
MODEL: Final = f"{CHECKPOINT}:/models/model:ro"
HARDENED: Final = (
    "--read-only", "--read-only-tmpfs=false", "--cap-drop", "all",
    "--security-opt", "no-new-privileges",
    "--tmpfs", "/tmp:rw,nosuid,nodev,noexec,size=64m,mode=1777",
)  # fmt: skip
# runc, and limits that need no more rights than a machine in a sandbox has.
FLAGS: Final = shlex.split(
    os.environ.get(
        "PODMAN_FLAGS", "--runtime runc --ulimit nofile=20000:20000 --ulimit nproc=32768:32768"
    )
)


def podman(*words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["podman", *words], check=False, capture_output=True, text=True, timeout=seconds
    )


def must(*words: str, seconds: float = 60) -> str:
    done = podman(*words, seconds=seconds)
    assert done.returncode == 0, f"podman {' '.join(words)}: {done.stderr}"
    return done.stdout


def once(
    target: str, *words: str, flags: Sequence[str] = (), seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs an image to its end, hardened."""
    name = f"chiasm-test-{uuid.uuid4().hex[:12]}"
    return podman(
        "run", "--rm", "--name", name, *FLAGS, *HARDENED, *flags, build.image(target), *words,
        seconds=seconds,
    )  # fmt: skip


def python(target: str, code: str) -> str:
    """What the image's Python prints for `code`."""
    done = once(target, "-c", code, flags=["--entrypoint", "python"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def config(target: str) -> dict[str, Any]:
    """The configuration of an image: user, entry point, labels and so on."""
    read: dict[str, Any] = json.loads(must("image", "inspect", build.image(target)))[0]
    return read


@contextmanager
def root_of(target: str) -> Iterator[Path]:
    """The file system of an image, to look at."""
    name = build.image(target)
    yield Path(must("image", "mount", name).strip())
    must("image", "umount", name)


@dataclass(frozen=True)
class Container:
    """One that runs in the background."""

    name: str

    def state(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(must("inspect", self.name))[0]["State"]
        return read

    def log(self) -> str:
        done = podman("logs", self.name)
        return done.stdout + done.stderr

    def health(self) -> int:
        """Runs the image's own health check; 0 is healthy."""
        return podman("healthcheck", "run", self.name).returncode

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        return podman("exec", self.name, *words)

    def send(self, signal: str) -> None:
        must("kill", "--signal", signal, self.name)

    def port(self, number: int) -> str:
        """host:port under which this machine reaches a published port."""
        return (
            must("port", self.name, f"{number}/tcp").splitlines()[0].replace("0.0.0.0", "127.0.0.1")
        )

    def ended(self, seconds: float) -> int:
        """Its exit code; fails if it still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while (state := self.state())["Running"]:
            assert time.monotonic() < deadline, f"{self.name} still runs: {self.log()[-2000:]}"
            time.sleep(0.1)
        return int(state["ExitCode"])


@contextmanager
def network() -> Iterator[str]:
    name = f"chiasm-test-{uuid.uuid4().hex[:12]}"
    must("network", "create", name)
    try:
        yield name
    finally:
        podman("network", "rm", "--force", name)


@contextmanager
def started(
    target: str, *words: str, name: str, on: str, flags: Sequence[str] = ()
) -> Iterator[Container]:
    """A hardened container on a network, where others reach it by `name`."""
    full = f"{on}-{name}"
    must(
        "run", "--detach", "--name", full, "--network", f"{on}:alias={name}", *FLAGS, *HARDENED,
        *flags, build.image(target), *words,
    )  # fmt: skip
    try:
        yield Container(full)
    finally:
        podman("rm", "--force", "--time", "0", full)


def wait_healthy(container: Container, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while container.health() != 0:
        assert container.state()["Running"], container.log()[-3000:]
        assert time.monotonic() < deadline, container.log()[-3000:]
        time.sleep(0.3)
