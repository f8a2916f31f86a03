"""The address of the shared store may be in a file, as secrets are mounted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_service.settings import LlmSettings

URL = "redis://user:hush-hush@store:6379/1"


def test_the_file_says_what_the_flag_would(tmp_path: Path) -> None:
    held = tmp_path / "url"
    held.write_text(f"{URL}\n")
    settings = LlmSettings(model=Path(), reference_store_file=held)
    assert settings.shared_references is not None
    assert settings.shared_references.url == URL


def test_both_at_once_are_refused(tmp_path: Path) -> None:
    held = tmp_path / "url"
    held.write_text(URL)
    with pytest.raises(ValueError, match="give one of the two") as told:
        LlmSettings(model=Path(), reference_store=URL, reference_store_file=held)
    assert "hush" not in str(told.value)


@pytest.mark.parametrize(
    "content", [b"", b"http://store", b"\xff\xfehush", b"hush\n" + b"x" * 9000]
)
def test_a_wrong_file_ends_the_start_without_its_content(tmp_path: Path, content: bytes) -> None:
    held = tmp_path / "url"
    held.write_bytes(content)
    done = _started(held)
    assert done.returncode == 2
    assert "reference_store_file" in done.stderr
    assert "hush" not in done.stderr + done.stdout


def test_a_missing_file_ends_the_start_with_its_path(tmp_path: Path) -> None:
    done = _started(tmp_path / "absent")
    assert done.returncode == 2
    assert str(tmp_path / "absent") in done.stderr


def _started(held: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "llm_service", "--model", "."],
        env=os.environ | {"CHIASM_LLM_REFERENCE_STORE_FILE": str(held)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
