"""Discovery: real files that change, the real resolver for localhost, a test's own for the rest."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from llm_service.vision.discovery import check_target, discovery, parse_lines

QUICK = 0.02
Found = frozenset[str]


class Names:
    """A resolver: what each look-up of a name gives, the last one for ever."""

    def __init__(self, *answers: Sequence[str] | OSError | None) -> None:
        self._answers = list(answers)
        self.calls = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.calls += 1
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, OSError):
            raise answer
        assert answer is not None
        return [f"{one}:{port}" for one in answer]


@contextlib.asynccontextmanager
async def watched(*targets: str, names: Names | None = None) -> AsyncIterator[AsyncIterator[Found]]:
    found = discovery(targets, dns_seconds=QUICK, file_seconds=QUICK, resolve=names)
    stream = found.addresses()
    try:
        yield stream
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


async def following(stream: AsyncIterator[Found]) -> Found:
    async with asyncio.timeout(5):
        return await anext(stream)


async def nothing_more(stream: AsyncIterator[Found]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10 * QUICK):
            await anext(stream)


async def test_fixed_addresses_are_told_once() -> None:
    async with watched("a:1", "b:2", "a:1") as stream:
        assert await following(stream) == {"a:1", "b:2"}
        await nothing_more(stream)


async def test_a_name_is_looked_up_again_and_again() -> None:
    names = Names(["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.2"])
    async with watched("dns:///encoders:50061", names=names) as stream:
        seen = [await following(stream) for _ in range(4)]
    assert seen == [
        frozenset(),
        {"10.0.0.1:50061"},
        {"10.0.0.1:50061", "10.0.0.2:50061"},
        {"10.0.0.2:50061"},
    ]


@pytest.mark.parametrize("trouble", [OSError("SERVFAIL"), []], ids=["failure", "no address"])
async def test_a_name_that_fails_later_leaves_the_fleet_as_it_was(
    trouble: OSError | list[str],
) -> None:
    names = Names(["10.0.0.1"], trouble, trouble, ["10.0.0.3"])
    async with watched("dns:///encoders:1", names=names) as stream:
        seen = [await following(stream) for _ in range(3)]
    assert seen == [frozenset(), {"10.0.0.1:1"}, {"10.0.0.3:1"}]


async def test_a_name_that_hangs_keeps_no_fixed_address_waiting() -> None:
    async with watched("a:1", "dns:///encoders:1", names=Names(None)) as stream:
        assert await following(stream) == {"a:1"}


async def test_the_systems_resolver_knows_localhost() -> None:
    async with watched("dns:///localhost:50061") as stream:
        assert await following(stream) == frozenset()
        found = await following(stream)
    assert found <= {"127.0.0.1:50061", "[::1]:50061"}
    assert found


async def test_a_file_that_changes_changes_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    path.write_text("a:1\n# b:1\n\n c:1 # the third\n")
    async with watched(f"file://{path}") as stream:
        assert await following(stream) == frozenset()
        assert await following(stream) == {"a:1", "c:1"}
        other = tmp_path / "other"
        other.write_text("d:1\n")
        other.replace(path)
        assert await following(stream) == {"d:1"}
        path.write_text("")
        assert await following(stream) == frozenset()


async def test_a_config_map_that_swaps_a_link_is_followed(tmp_path: Path) -> None:
    for name, line in (("v1", "a:1"), ("v2", "b:1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "encoders").write_text(line)
    (tmp_path / "data").symlink_to("v1")
    async with watched(f"file://{tmp_path}/data/encoders") as stream:
        assert await following(stream) == frozenset()
        assert await following(stream) == {"a:1"}
        (tmp_path / "next").symlink_to("v2")
        (tmp_path / "next").rename(tmp_path / "data")
        assert await following(stream) == {"b:1"}


async def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    async with watched(f"file://{path}") as stream:
        assert await following(stream) == frozenset()
        await nothing_more(stream)
    async with watched(f"file://{path}") as stream:
        assert await following(stream) == frozenset()
        path.write_text("a:1")
        assert await following(stream) == {"a:1"}


async def test_what_cannot_be_read_leaves_the_fleet_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    path.write_text("a:1")
    async with watched(f"file://{path}") as stream:
        assert await following(stream) == frozenset()
        assert await following(stream) == {"a:1"}
        path.unlink()
        await asyncio.sleep(3 * QUICK)
        path.mkdir()
        await asyncio.sleep(3 * QUICK)
        path.rmdir()
        path.write_bytes(b"b:1\n" * (1 << 19))
        await asyncio.sleep(3 * QUICK)
        path.write_text("c:1")
        assert await following(stream) == {"c:1"}


def test_lines_that_are_no_address_are_named_and_the_rest_holds() -> None:
    found, bad = parse_lines("a:1\nhttp://b:1\nc\n:1\nd:0\ne:65536\n[::1]:5\n::1:5\ng h:1\n\x00\n")
    assert found == {"a:1", "[::1]:5"}
    assert bad == [2, 3, 4, 5, 6, 8, 9, 10]


async def test_a_file_of_other_bytes_than_text_gives_nothing(tmp_path: Path) -> None:
    path = tmp_path / "encoders"
    path.write_bytes(os.urandom(4096) + b"\na:1\n")
    async with watched(f"file://{path}") as stream:
        assert await following(stream) == frozenset()
        assert await following(stream) >= {"a:1"}


async def test_leaving_ends_every_task(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with watched("dns:///n:1", f"file://{tmp_path}/f", names=Names(None)) as stream:
        await following(stream)
        assert len(asyncio.all_tasks()) > len(before)
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before
    assert threading.active_count() < 40


@pytest.mark.parametrize("target", ["a:1", "[::1]:5", "dns:///encoders.ns:5", "file:///etc/e"])
def test_targets_of_the_three_forms_are_taken(target: str) -> None:
    check_target(target)


@pytest.mark.parametrize(
    "target",
    ["a", "a:", ":5", "a:0", "a:x", "a:70000", "::1:5", "http://a:1", "dns://a:1", "dns:///a",
     "file:///", "file://x", "a b:1", "a:1/x", "a:١"],
)  # fmt: skip
def test_other_targets_are_refused_with_the_forms_there_are(target: str) -> None:
    with pytest.raises(ValueError, match="file:///path"):
        check_target(target)
