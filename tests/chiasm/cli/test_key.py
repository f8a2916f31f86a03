"""`chiasm key new`: what it shows, what it writes, and that the gateway reads it."""

import re
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from chiasm import api_keys
from chiasm.cli import main
from gateway.keys.file import read_keys
from gateway.keys.limits import Limits

NEW = ["key", "new", "--name", "alice", "--tenant", "team-a"]


def test_a_key_is_shown_once_and_its_entry_is_what_the_gateway_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(NEW) == 0
    out = capsys.readouterr().out
    key = out.splitlines()[0]
    assert key.startswith("chiasm-")
    assert out.count(key) == 1
    path = tmp_path / "keys.toml"
    path.write_text(out[out.index("[[key]]") :])
    [read] = read_keys(path)
    assert (read.name, read.tenant, read.digest) == ("alice", "team-a", api_keys.digest_of(key))
    assert (read.limits, read.expires) == (Limits(), None)


def test_a_file_takes_one_entry_after_the_other_and_never_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9000"]
    more = [*limits, "--concurrent-requests", "4", "--days", "30"]
    assert main([*NEW, "--file", str(path), *more]) == 0
    first = capsys.readouterr().out.strip()
    assert main(["key", "new", "--name", "bob", "--tenant", "b", "--file", str(path)]) == 0
    second = capsys.readouterr().out.strip()
    assert re.fullmatch(r"chiasm-[\w-]{43}", second)
    alice, bob = read_keys(path)
    assert alice.digest == api_keys.digest_of(first)
    assert bob.digest == api_keys.digest_of(second)
    assert alice.limits == Limits(60, 9000, 4)
    left = (alice.expires or 0) - datetime.now(UTC).timestamp()
    assert 29.9 < left / 86_400 <= 30
    assert first not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    assert main([*NEW, "--file", str(path)]) == 0
    before = path.read_bytes()
    assert main([*NEW, "--file", str(path)]) == 2
    assert "alice already" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["[[key", 'key = "x"', "[[key]]\nname = 1\nx", "[key]\nname = 1"])
def test_a_file_of_another_kind_is_left_alone(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    assert main([*NEW, "--file", str(path)]) == 2
    assert "is no keys file" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a\nb", "-a", "x" * 65, "ä"])
def test_names_that_could_not_stand_in_a_log_are_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["key", "new", f"--name={name}", "--tenant", "t"])
    assert ended.value.code == 2
    assert "letters, digits" in capsys.readouterr().err
