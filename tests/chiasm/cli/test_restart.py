"""What `--restart` does, over small programs of the tests' own, as real processes."""

import asyncio
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from chiasm.cli.plan import Command, Plan
from chiasm.cli.restart import Backoff
from chiasm.cli.system import Limits, PartFailed, supervise

LIMITS = Limits(ready=20, stop=10)
QUICK = Backoff(first=0.05, longest=0.2, long_life=60)
READY = 'import json; print(json.dumps({"event": "ready"}), flush=True)\n'
SLEEP = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0))\n"
    f"{READY}import time; time.sleep(600)\n"
)


def test_restarts_come_ever_later_up_to_a_limit() -> None:
    backoff = Backoff(first=0.5, longest=30)
    assert [backoff.delay(n) for n in (1, 2, 3, 4)] == [0.5, 1, 2, 4]
    assert backoff.delay(7) == backoff.delay(10_000) == 30


class _Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def plan_of(directory: Path, url: str, **programs: str) -> Plan:
    path = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
    for name, text in programs.items():
        (directory / f"{name}.py").write_text(text)
    commands = (Command(name, name, (), "nowhere", 1, {"PYTHONPATH": path}) for name in programs)
    return Plan(tuple(commands), url, "", ())


def running(module: str) -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if module in one.cmdline()]


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not reached():
            await asyncio.sleep(0.02)


@pytest.mark.system
async def test_a_killed_part_is_started_again_and_its_neighbour_is_left_alone(
    tmp_path: Path, url: str
) -> None:
    shown: list[str] = []

    def told(words: str, times: int) -> bool:
        return sum(words in line for line in shown) == times

    async def kill_twice(_: Plan) -> int:
        (sound,) = running("sound")
        for again in (1, 2):
            running("frail")[0].kill()
            await until(partial(told, "ready again", again))
        assert [one.pid for one in running("sound")] == [sound.pid]
        return 0

    plan = plan_of(tmp_path, url, sound=SLEEP, frail=SLEEP)
    assert await supervise(plan, kill_twice, LIMITS, shown.append, lambda *_: None, QUICK) == 0
    deaths = [line for line in shown if "was ended by SIGKILL" in line]
    assert [line.split("starting again in ")[1] for line in deaths] == ["0.05 s", "0.1 s"]
    assert psutil.Process().children() == []


@pytest.mark.system
async def test_a_part_that_refuses_its_settings_ends_all(tmp_path: Path, url: str) -> None:
    marker = tmp_path / "started"
    text = (
        f"import pathlib, sys; marker = pathlib.Path({str(marker)!r})\n"
        "if marker.exists(): sys.exit(2)\n"
        f"marker.touch()\n{SLEEP}"
    )

    async def kill_picky(_: Plan) -> int:
        running("picky")[0].kill()
        await asyncio.Event().wait()
        return 0

    plan = plan_of(tmp_path, url, picky=text)
    with pytest.raises(PartFailed, match=r"picky .* ended with exit code 2"):
        await supervise(plan, kill_picky, LIMITS, print, lambda *_: None, QUICK)
    assert psutil.Process().children() == []


@pytest.mark.system
async def test_a_restarted_part_that_is_never_ready_is_killed_and_tried_again(
    tmp_path: Path, url: str
) -> None:
    count = tmp_path / "count"
    count.write_text("")
    text = (
        f"import pathlib, time; count = pathlib.Path({str(count)!r})\n"
        "count.write_text(count.read_text() + 'x')\n"
        f"if len(count.read_text()) == 2: time.sleep(600)\n{SLEEP}"
    )
    shown: list[str] = []

    async def kill(_: Plan) -> int:
        running("slow")[0].kill()
        await until(lambda: any("ready again" in line for line in shown))
        return 0

    limits = Limits(ready=3, stop=10)
    plan = plan_of(tmp_path, url, slow=text)
    assert await supervise(plan, kill, limits, shown.append, lambda *_: None, QUICK) == 0
    assert any("not ready within 3 s, killed" in line for line in shown)
    assert count.read_text() == "xxx"


@pytest.mark.system
async def test_a_stop_amid_a_restart_leaves_nothing(tmp_path: Path, url: str) -> None:
    shown: list[str] = []

    async def kill(_: Plan) -> int:
        running("frail")[0].kill()
        await until(lambda: any("starting again" in line for line in shown))
        return 3

    plan = plan_of(tmp_path, url, frail=SLEEP)
    wait_long = Backoff(first=60)
    assert await supervise(plan, kill, LIMITS, shown.append, lambda *_: None, wait_long) == 3
    assert psutil.Process().children() == []
