"""Prometheus as it is installed: its checker, and a server that scrapes real processes.

On Debian both come with `apt install prometheus`; tests that want them skip without them.
"""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.monitoring.page import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
RULES = sorted((MONITORING / "rules").glob("*.yaml"))
_READY_SECONDS = 30.0


def program(name: str) -> str:
    """Its path. Skips the test where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt install prometheus)")
    return path


def promtool(*arguments: str | Path) -> str:
    """What promtool says. Raises AssertionError where it is not content."""
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression. Raises AssertionError where it is none."""
        with httpx.Client(base_url=self.url, trust_env=False) as http:
            told = http.get("/api/v1/query", params={"query": expression}).json()
        assert told["status"] == "success", (expression, told)
        vector: list[dict[str, Any]] = told["data"]["result"]
        return vector

    def value(self, expression: str) -> float:
        """The value of its only series; NaN where there is none."""
        found = self.ask(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else float("nan")


@contextmanager
def prometheus(directory: Path, port: int, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """Prometheus with the shipped rules; scrapes the ports of `targets`, by job, each second."""
    jobs = "".join(
        f"  - job_name: {job}\n    static_configs:\n      - targets: ['127.0.0.1:{at}']\n"
        for job, at in targets.items()
    )
    rules = ", ".join(f"'{path}'" for path in RULES)
    config = directory / "prometheus.yaml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{rules}]\nscrape_configs:\n{jobs}"
    )
    command = [
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _await_ready(process, url, directory / "log")
        yield Prometheus(url)
    finally:
        process.kill()
        process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    until = time.monotonic() + _READY_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"Prometheus does not serve:\n{log.read_text()}")
