"""The supervisor over small programs of the tests' own, as real processes."""

import asyncio
import http.server
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from chiasm.cli.part import Part
from chiasm.cli.plan import Command, Plan
from chiasm.cli.system import Interrupted, Limits, LogSink, PartFailed, running_part, supervise

LIMITS = Limits(ready=20, stop=10)
READY = 'import json; print(json.dumps({"event": "ready"}), flush=True)\n'
SERVE = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); "
SLEEPER = f"{SERVE}\n{READY}\nimport time; time.sleep(600)\n"
STUBBORN = (
    f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}"
    "import time; time.sleep(600)\n"
)

pytestmark = pytest.mark.system


class Programs:
    """Writes modules that parts can run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def command(self, name: str, text: str, rank: int = 1) -> Command:
        module = name.replace(" ", "_")
        (self._directory / f"{module}.py").write_text(text)
        path = os.pathsep.join([str(self._directory), os.environ.get("PYTHONPATH", "")])
        return Command(name, module, (), "nowhere", rank, {"PYTHONPATH": path})


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def quiet(_: str, __: str) -> None:
    """A log that nobody reads."""


async def forever(_: Plan) -> int:
    await asyncio.Event().wait()
    return 0


def plan_of(*commands: Command) -> Plan:
    return Plan(commands, "http://127.0.0.1:9", "", ())


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def test_a_part_that_ends_by_itself_is_told_with_its_code_and_last_words(
    programs: Programs,
) -> None:
    words = "import sys; print('first\\nthe disk is full', file=sys.stderr); sys.exit(7)"
    plan = plan_of(programs.command("sound", SLEEPER), programs.command("ill", words))
    with pytest.raises(PartFailed) as failed:
        await supervise(plan, forever, LIMITS, print, quiet)
    assert "ill (process " in str(failed.value)
    assert "ended with exit code 7" in str(failed.value)
    assert str(failed.value).endswith("\n    first\n    the disk is full")
    assert children() == []


async def test_a_part_that_never_says_ready_is_named(programs: Programs) -> None:
    mute = f"{SERVE}\nimport time; time.sleep(600)\n"
    plan = plan_of(programs.command("sound", SLEEPER), programs.command("mute", mute))
    with pytest.raises(PartFailed, match=r"not ready within 1 s: mute$"):
        await supervise(plan, forever, Limits(ready=1, stop=10), print, quiet)
    assert children() == []


async def test_a_gateway_that_never_reaches_its_service_is_told(programs: Programs) -> None:
    plan = plan_of(programs.command("sound", SLEEPER))
    with pytest.raises(PartFailed, match="the gateway's path to the LLM service"):
        await supervise(plan, forever, Limits(ready=1, stop=10), print, quiet)


class Ready(http.server.BaseHTTPRequestHandler):
    """Answers /ready as a gateway does."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_parts_stop_rank_after_rank_once_the_job_is_done(
    programs: Programs, url: str
) -> None:
    ranks = {"back": 2, "front": 0, "middle": 1}
    commands = tuple(programs.command(name, SLEEPER, rank) for name, rank in ranks.items())
    shown: list[str] = []

    async def job(_: Plan) -> int:
        assert sum(" ready in " in line for line in shown) == 3
        return 5

    assert await supervise(Plan(commands, url, "", ()), job, LIMITS, shown.append, quiet) == 5
    stopped = [line.split()[0] for line in shown if " stopped in" in line]
    assert stopped == ["front", "middle", "back"]
    assert children() == []


async def test_a_part_that_dies_later_ends_the_job(programs: Programs, url: str) -> None:
    plan = Plan((programs.command("mayfly", SLEEPER),), url, "", ())

    async def job(_: Plan) -> int:
        for child in children():
            child.kill()
        await asyncio.Event().wait()
        return 0

    with pytest.raises(PartFailed, match=r"mayfly .* was ended by SIGKILL; it wrote nothing"):
        await supervise(plan, job, LIMITS, print, quiet)


async def test_a_part_that_ignores_sigterm_is_killed_in_time(programs: Programs) -> None:
    part = Part(programs.command("stubborn", STUBBORN), quiet)
    async with running_part(part, Limits(ready=20, stop=0.2)):
        assert part.exit_code is None
    assert part.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_during_the_start_stops_everything(
    number: signal.Signals, programs: Programs
) -> None:
    plan = plan_of(programs.command("sound", SLEEPER))
    asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), number)
    with pytest.raises(Interrupted, match=number.name):
        await supervise(plan, forever, LIMITS, print, quiet)
    assert children() == []


async def test_a_second_signal_ends_a_stubborn_part_at_once(programs: Programs) -> None:
    loop = asyncio.get_running_loop()

    def show(text: str) -> None:
        if "starting" in text:
            loop.call_later(1, os.kill, os.getpid(), signal.SIGINT)
            loop.call_later(2, os.kill, os.getpid(), signal.SIGINT)

    plan = plan_of(programs.command("stubborn", STUBBORN))
    began = loop.time()
    with pytest.raises(Interrupted):
        await supervise(plan, forever, Limits(ready=20, stop=60), show, quiet)
    assert loop.time() - began < 10
    assert children() == []


async def test_what_a_part_started_ends_with_it(programs: Programs, tmp_path: Path) -> None:
    noted = tmp_path / "grandchild"
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(noted)!r}, 'w').write(str(child.pid))\n{READY}"
        "import time; time.sleep(600)\n"
    )
    part = Part(programs.command("parent", text), quiet)
    async with running_part(part, LIMITS):
        grandchild = psutil.Process(int(noted.read_text()))
        assert grandchild.is_running()
    assert part.exit_code == -signal.SIGTERM
    _, left = psutil.wait_procs([grandchild], timeout=5)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)


async def test_log_lines_of_any_length_pass_whole(programs: Programs) -> None:
    lines: list[str] = []
    long = f"import sys; sys.stderr.write('x' * 300_000 + '\\nend'); sys.stderr.flush()\n{SLEEPER}"

    def sink(_: str, line: str) -> None:
        lines.append(line)

    async with running_part(Part(programs.command("verbose", long), sink), LIMITS):
        pass
    assert [len(line) for line in lines] == [300_000, 3]


def test_logs_go_to_the_stream_behind_their_names_and_to_files(tmp_path: Path) -> None:
    stream = io.StringIO()
    sink = LogSink(stream, tmp_path / "logs")
    sink("encoder 1", "hello")
    sink("LLM service", "there")
    sink.close()
    assert stream.getvalue() == "encoder 1 | hello\nLLM service | there\n"
    assert (tmp_path / "logs" / "encoder-1.log").read_text() == "hello\n"
    assert (tmp_path / "logs" / "llm-service.log").read_text() == "there\n"


def test_a_child_whose_parent_is_gone_does_not_start() -> None:
    from chiasm.cli.child import PROGRAM

    async def run(check: Callable[[int], bool], parent: int) -> None:
        words = [*PROGRAM, str(parent), "-c", "pass"]
        process = await asyncio.create_subprocess_exec(sys.executable, *words)
        assert check(await process.wait())

    asyncio.run(run(lambda code: code == 0, os.getpid()))
    if sys.platform == "linux":
        asyncio.run(run(lambda code: code == 1, os.getpid() + 1))
