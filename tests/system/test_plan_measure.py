"""`chiasm plan --measure` against real services."""

import json
import subprocess
import sys

import pytest

from tests.system.processes import ROOT, service_environment
from tests.system.three import Three

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def plan(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "chiasm.cli", "plan", "--requests", "5", *words],
        capture_output=True, text=True, cwd=ROOT, env=service_environment({}), timeout=120,
    )  # fmt: skip


def test_rates_are_measured_shown_and_planned_with(demo: Three) -> None:
    services = ("--encoder", demo.encoder.target, "--llm", demo.llm.target)
    done = plan("--measure", *services, "--sizes", "200x100:.5,640x480:.5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["traffic"]["rows"] == [[16, 0.5], [16, 0.5]]
    assert found["picture_bytes"] == 16 * 192 * 4
    assert 1e-4 < found["rates"]["encode"]["fixed"] < 1
    assert 1e-5 < found["rates"]["step"]["fixed"] + found["rates"]["step"]["each"] < 1
    assert "encoder: 640x480, 16 rows" in done.stderr
    shown = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("measured")]
    again = plan("--rows", "16", *shown[0], *shown[1], "--json")
    assert json.loads(again.stdout)["rates"]["step"]["each"] == pytest.approx(
        found["rates"]["step"]["each"], rel=1e-2
    )


def test_a_service_that_does_not_answer_is_told() -> None:
    done = plan("--pictures", "0", "--measure", "--llm", "127.0.0.1:1", "--timeout", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: a service that was measured answered: ")
    assert "Traceback" not in done.stderr
