"""Discovery: real files that change, the real resolver for localhost, a test's own for the rest."""

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from llm_service.vision.discovery import addresses_of, check_target, discovery, parse_lines

QUICK = 0.02
Found = frozenset[str]
Told = asyncio.Queue[Found]
Answer = Sequence[str] | OSError | threading.Event


class Names:
    """A resolver: what each look-up gives, the last one for ever; an event hangs until it is set.

    `most` is how many look-ups there were at a time.
    """

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self._running = 0
        self.calls = self.most = 0

    def __call__(self, host: str) -> Sequence[str]:
        self.calls += 1
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            return self._answer()
        finally:
            self._running -= 1

    def _answer(self) -> Sequence[str]:
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, threading.Event):
            answer.wait(10)
            return []
        if isinstance(answer, OSError):
            raise answer
        return answer


@contextlib.asynccontextmanager
async def watched(
    *targets: str, resolve: Callable[[str], Sequence[str]] = addresses_of, patience: float = 5
) -> AsyncIterator[Told]:
    found = discovery(
        targets,
        dns_seconds=QUICK,
        file_seconds=QUICK,
        patience_seconds=patience,
        resolve=resolve,
    )
    told: Told = asyncio.Queue()

    async def follow() -> None:
        async for addresses in found.addresses():
            told.put_nowait(addresses)

    task = asyncio.create_task(follow())
    try:
        yield told
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """Held until the test is over, so that no thread outlives it."""
    event = threading.Event()
    yield event
    event.set()
    while look_threads():
        time.sleep(0.001)


def look_threads() -> int:
    return sum(thread.name == "look for encoders" for thread in threading.enumerate())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(QUICK)


async def following(told: Told) -> Found:
    async with asyncio.timeout(5):
        return await told.get()


async def nothing_more(told: Told) -> None:
    """For the time of several looks."""
    await asyncio.sleep(10 * QUICK)
    assert told.empty()


async def test_fixed_addresses_are_told_once() -> None:
    async with watched("a:1", "b:2", "a:1") as told:
        assert await following(told) == {"a:1", "b:2"}
        await nothing_more(told)


async def test_a_name_is_looked_up_again_and_again() -> None:
    names = Names(["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"])
    async with watched("dns:///encoders:50061", resolve=names) as told:
        seen = [await following(told) for _ in range(4)]
    assert seen == [
        frozenset(),
        {"10.0.0.1:50061"},
        {"10.0.0.1:50061", "10.0.0.2:50061"},
        {"10.0.0.2:50061"},
    ]


@pytest.mark.parametrize(
    "trouble",
    [socket.gaierror(socket.EAI_AGAIN, "SERVFAIL"), socket.gaierror(socket.EAI_NONAME, "no"), []],
    ids=["failure", "no such name", "no address"],
)
async def test_a_name_that_fails_later_leaves_the_fleet_as_it_was(trouble: Answer) -> None:
    names = Names(["10.0.0.1"], trouble, trouble, ["10.0.0.3"])
    async with watched("dns:///encoders:1", resolve=names) as told:
        seen = [await following(told) for _ in range(3)]
    assert seen == [frozenset(), {"10.0.0.1:1"}, {"10.0.0.3:1"}]


async def test_trouble_is_logged_when_it_begins_and_when_it_ends() -> None:
    trouble = socket.gaierror(socket.EAI_AGAIN, "SERVFAIL")
    names = Names(*[trouble] * 5, ["10.0.0.1"])
    with structlog.testing.capture_logs() as logs:
        async with watched("dns:///encoders:1", resolve=names) as told:
            assert await following(told) == frozenset()
            assert await following(told) == {"10.0.0.1:1"}
    assert [log["log_level"] for log in logs] == ["warning", "info"]
    assert logs[0]["name"] == "encoders"
    assert "SERVFAIL" in logs[0]["detail"]


async def test_a_resolver_that_breaks_is_logged_once_and_asked_again() -> None:
    class Broken(Names):
        def __call__(self, host: str) -> Sequence[str]:
            found = super().__call__(host)
            if self.calls < 5:
                raise ArithmeticError("no resolver's business")
            return found

    with structlog.testing.capture_logs() as logs:
        async with watched("dns:///encoders:1", resolve=Broken(["10.0.0.1"])) as told:
            assert await following(told) == frozenset()
            assert await following(told) == {"10.0.0.1:1"}
    assert [log["event"] for log in logs] == ["fault"]


async def test_a_name_that_hangs_keeps_no_fixed_address_and_no_file_waiting(
    tmp_path: Path, hang: threading.Event
) -> None:
    (tmp_path / "e").write_text("b:1")
    targets = ("a:1", "dns:///encoders:1", f"file://{tmp_path}/e")
    async with watched(*targets, resolve=Names(hang)) as told:
        assert await following(told) == {"a:1"}
        assert await following(told) == {"a:1", "b:1"}


async def test_a_resolver_that_hangs_holds_one_thread(hang: threading.Event) -> None:
    names = Names(["10.0.0.1"], hang, ["10.0.0.2"])
    with structlog.testing.capture_logs() as logs:
        async with watched("dns:///encoders:1", resolve=names, patience=QUICK) as told:
            assert await following(told) == frozenset()
            assert await following(told) == {"10.0.0.1:1"}
            await nothing_more(told)
            assert (names.calls, names.most, look_threads()) == (2, 1, 1)
            hang.set()
            assert await following(told) == {"10.0.0.2:1"}
    assert logs[0]["detail"] == "TimeoutError"


async def test_leaving_does_not_wait_for_a_resolver_that_hangs(hang: threading.Event) -> None:
    before = asyncio.all_tasks()
    async with watched("dns:///encoders:1", resolve=Names(hang)) as told:
        await following(told)
        await until(lambda: look_threads() == 1)
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert asyncio.all_tasks() == before
    hang.set()
    await until(lambda: look_threads() == 0)


def test_a_process_ends_while_its_resolver_hangs() -> None:
    program = """
import asyncio, threading
from llm_service.vision.discovery import discovery
hangs = threading.Event()
def resolve(host):
    hangs.set()
    threading.Event().wait()
async def main():
    stream = discovery(["dns:///encoders:1"], resolve=resolve).addresses()
    await anext(stream)
    while not hangs.is_set():
        await asyncio.sleep(0.01)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_the_systems_resolver_knows_localhost_as_one_encoder() -> None:
    async with watched("dns:///localhost:50061") as told:
        assert await following(told) == frozenset()
        found = await following(told)
    assert found in ({"127.0.0.1:50061"}, {"[::1]:50061"})


async def test_an_ipv6_address_of_a_name_stands_in_brackets() -> None:
    async with watched("dns:///encoders:5", resolve=Names(["fd00::1", "fd00::2"])) as told:
        await following(told)
        assert await following(told) == {"[fd00::1]:5", "[fd00::2]:5"}


async def test_one_address_from_several_sources_is_one_encoder(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    path.write_text("10.0.0.1:5\n10.0.0.1:05\n[FD00:0::1]:5\nB.example:5\n")
    targets = ("10.0.0.1:5", "[fd00::1]:5", "b.example:5", f"file://{path}", "dns:///encoders:5")
    names = Names(["10.0.0.1"], ["10.0.0.1"], ["10.0.0.1", "10.0.0.2"])
    async with watched(*targets, resolve=names) as told:
        fixed = {"10.0.0.1:5", "[fd00::1]:5", "b.example:5"}
        assert await following(told) == fixed
        assert await following(told) == fixed | {"10.0.0.2:5"}


async def test_a_file_that_changes_changes_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    path.write_text("a:1\n# b:1\n\n c:1 # the third\n")
    async with watched(f"file://{path}") as told:
        assert await following(told) == frozenset()
        assert await following(told) == {"a:1", "c:1"}
        other = tmp_path / "other"
        other.write_text("d:1\n")
        other.replace(path)
        assert await following(told) == {"d:1"}
        path.write_text("")
        assert await following(told) == frozenset()


async def test_a_config_map_that_swaps_a_link_is_followed(tmp_path: Path) -> None:
    for name, line in (("v1", "a:1"), ("v2", "b:1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "encoders").write_text(line)
    (tmp_path / "data").symlink_to("v1")
    async with watched(f"file://{tmp_path}/data/encoders") as told:
        assert await following(told) == frozenset()
        assert await following(told) == {"a:1"}
        (tmp_path / "next").symlink_to("v2")
        (tmp_path / "next").rename(tmp_path / "data")
        assert await following(told) == {"b:1"}


async def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    async with watched(f"file://{path}") as told:
        assert await following(told) == frozenset()
        await nothing_more(told)
    async with watched(f"file://{path}") as told:
        assert await following(told) == frozenset()
        path.write_text("a:1")
        assert await following(told) == {"a:1"}


async def test_what_cannot_be_read_leaves_the_fleet_as_it_was(tmp_path: Path) -> None:
    path, huge = tmp_path / "encoders", tmp_path / "huge"
    path.write_text("a:1")
    huge.write_bytes(b"b:1\n" * (1 << 19))
    with structlog.testing.capture_logs() as logs:

        async def told_in_the_log(kind: str) -> None:
            await until(lambda: any(kind in log.get("detail", "") for log in logs))

        async with watched(f"file://{path}") as told:
            assert await following(told) == frozenset()
            assert await following(told) == {"a:1"}
            path.unlink()
            await told_in_the_log("FileNotFoundError")
            path.mkdir()
            await told_in_the_log("IsADirectoryError")
            path.rmdir()
            huge.rename(path)
            await told_in_the_log("more than 1048576 bytes")
            path.write_text("c:1")
            assert await following(told) == {"c:1"}
    assert logs[-1]["event"].endswith("over")


async def test_a_pipe_in_a_files_place_holds_one_thread(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    os.mkfifo(path)
    async with watched("a:1", f"file://{path}", patience=QUICK) as told:
        assert await following(told) == {"a:1"}
        await nothing_more(told)
        assert look_threads() == 1
        path.write_text("")  # Lets the reader go.
    await until(lambda: look_threads() == 0)


async def test_a_file_caught_while_it_is_written_takes_nobody_away(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    path.write_text("a:1\nb:1\n")
    async with watched(f"file://{path}") as told:
        assert await following(told) == frozenset()
        assert await following(told) == {"a:1", "b:1"}
        with path.open("w") as file:
            await asyncio.sleep(2 * QUICK)
            file.write("a:1\nb:1\nc:1\n")
        assert await following(told) == {"a:1", "b:1", "c:1"}


async def test_lines_that_are_no_address_are_logged_once_with_their_numbers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "encoders"
    path.write_text("a:1\nhttp://b:1\nc\n")
    with structlog.testing.capture_logs() as logs:
        async with watched(f"file://{path}") as told:
            assert await following(told) == frozenset()
            assert await following(told) == {"a:1"}
            await nothing_more(told)
    assert [log["detail"] for log in logs] == ["ignored: lines 2, 3"]


def test_lines_that_are_no_address_are_named_and_the_rest_holds() -> None:
    found, bad = parse_lines(
        "a:1\r\nhttp://b:1\nc\n:1\nd:0\ne:65536\n[::1]:5\n::1:5\ng h:1\n\x00\n[]:1\n"
        "10.0.0.256:1\n[a]:1\na..b:1\n\u2028i:1\n"
    )
    assert found == {"a:1", "[::1]:5", "i:1"}
    assert bad == [2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]


async def test_a_file_with_other_bytes_than_text_gives_its_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    noise = random.Random(5).randbytes(4096).replace(b":", b"")
    path.write_bytes(b"\xef\xbb\xbfa:1\n" + noise + b"\nb:1\n\xff:1")
    async with watched(f"file://{path}") as told:
        assert await following(told) == frozenset()
        assert await following(told) == {"a:1", "b:1"}


@pytest.mark.parametrize(
    "target",
    ["a:1", "a_b.c-d:1", "a.b.:1", "10.0.0.1:5", "[::1]:5", "[fe80::1%eth0]:5",
     "dns:///encoders.ns:5", "dns:///[::1]:5", "file:///etc/e"],
)  # fmt: skip
def test_targets_of_the_three_forms_are_taken(target: str) -> None:
    check_target(target)


@pytest.mark.parametrize(
    "target",
    ["", "a", "a:", ":5", "a:0", "a:x", "a:70000", "a:" + "9" * 5000, "::1:5", "[]:5", "[::1:5",
     "[a]:5", "]:5", "10.0.0.256:5", "1.2.3:5", "a..b:5", "-a:5", "a" * 64 + ":5", "é:5",
     "http://a:1", "dns://a:1", "dns:a:1", "dns:///a", "dns:///:5", "unix:///s", "ipv4:1.2.3.4:5",
     "file:///", "file://x", "file:///\0", "a b:1", "a\n:1", "a:1/x", "a:١"],
)  # fmt: skip
def test_other_targets_are_refused_with_the_forms_there_are(target: str) -> None:
    with pytest.raises(ValueError, match="file:///path"):
        check_target(target)
