import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system.processes import ROOT, Process

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
STARTED_SECONDS = 120


def up(*flags: str) -> Process:
    return Process("-m", "chiasm.cli", "up", "--port", "0", *flags)


def wait_until(reached: Callable[[], bool], process: Process, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert process.alive, process.log()
        assert time.monotonic() < deadline, process.out() + process.log()
        time.sleep(0.05)


def wait_ready(process: Process) -> None:
    wait_until(lambda: "Ctrl-C stops" in process.out(), process, STARTED_SECONDS)


def address(process: Process) -> str:
    line = next(line for line in process.out().splitlines() if line.startswith("HTTP "))
    return line.split()[1].removesuffix("/v1")


def children(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def running(module: str, parts: list[psutil.Process]) -> psutil.Process:
    return next(part for part in parts if module in part.cmdline())


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    # What nobody reaped has ended all the same.
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def example(process: Process, title: str) -> str:
    """The program printed below a title, to the next one."""
    after = process.out().split(f"{title}:\n", 1)[1]
    return after.split("\nWith ", 1)[0].split("\nDo all ways", 1)[0]


def stopped_parts(process: Process) -> list[str]:
    return [
        line.split(" stopped")[0].strip()
        for line in process.out().splitlines()
        if " stopped in" in line
    ]


def answer_of(program: list[str]) -> str:
    return subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_the_printed_examples_get_an_answer_and_ctrl_c_stops_in_order() -> None:
    with up("--encoders", "2") as system:
        wait_ready(system)
        parts = children(system)
        assert len(parts) == 3 + 1
        assert answer_of([sys.executable, "-c", example(system, "With Python")]) == "blue\n"
        by_curl = json.loads(answer_of(["bash", "-c", example(system, "With curl")]))
        assert by_curl["choices"][0]["message"]["content"] == "blue"
        system.send_signal(signal.SIGINT)
        assert system.wait() == 0
        assert stopped_parts(system)[:2] == ["gateway", "LLM service"]
        assert sorted(stopped_parts(system)[2:]) == ["encoder 1", "encoder 2"]
        assert gone(parts, 0)
        assert "Traceback" not in system.log()


def test_a_part_that_is_killed_is_named_and_everything_stops() -> None:
    with up("--vision", "none") as system:
        wait_ready(system)
        parts = children(system)
        llm = running("llm_service", parts)
        llm.kill()
        assert system.wait() == 1
        assert f"LLM service (process {llm.pid}) was ended by SIGKILL" in system.log()
        assert gone(parts, 0)


def test_a_part_that_cannot_start_is_named_with_its_own_words(tmp_path: Path) -> None:
    with up("--model", str(tmp_path)) as system:
        assert system.wait(STARTED_SECONDS) == 1
        assert "ended with exit code 2; the end of its log:" in system.log()
        assert str(tmp_path) in system.log()


def test_no_part_outlives_a_killed_parent() -> None:
    with up("--vision", "none") as system:
        wait_until(lambda: "LLM service starting" in system.out(), system, STARTED_SECONDS)
        parts = children(system)
        assert len(parts) == 2
        system.kill()
        assert gone(parts, 5)


def test_a_second_ctrl_c_does_not_wait_for_answers() -> None:
    with up("--vision", "none") as system:
        wait_ready(system)
        parts = children(system)
        body = {
            "model": "chiasm-demo",
            "messages": [{"role": "user", "content": "Count to 50."}],
            "max_tokens": 1900,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{address(system)}/v1/chat/completions"
        with (
            httpx.Client(trust_env=False, timeout=60) as client,
            client.stream("POST", url, json=body) as answer,
        ):
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
            system.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert system.alive
            system.send_signal(signal.SIGINT)
            assert system.wait(5) == 0
        assert "stopping at once" in system.out()
        assert gone(parts, 0)


def test_a_taken_port_is_named_with_the_flag_that_mends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process("-m", "chiasm.cli", "up", "--port", str(port)) as system:
            assert system.wait() == 2
            assert f"port {port} on 127.0.0.1 is taken; choose another with --port" in system.log()
