"""The Containerfile keeps to hadolint's rules and to ours."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chiasm.settings import Settings
from deploy.images import build
from encoder_service.settings import EncoderSettings
from gateway.settings import GatewaySettings
from llm_service.settings import LlmSettings

TEXT = build.CONTAINERFILE.read_text(encoding="utf-8")


def hadolint() -> str | None:
    beside = Path(sys.executable).parent / "hadolint"
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.mark.skipif(hadolint() is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [str(hadolint()), str(build.CONTAINERFILE)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(hadolint() is None, reason="hadolint is not installed")
def test_hadolint_would_find_something() -> None:
    done = subprocess.run(
        [str(hadolint()), "-"], check=False, capture_output=True, text=True,
        input=TEXT + "\nFROM debian\nRUN cd /tmp && sudo ls\n",
    )  # fmt: skip
    assert done.returncode == 1


def test_every_port_and_setting_is_one_that_the_service_has() -> None:
    kinds: dict[str, type[Settings]] = {
        "ENCODER": EncoderSettings,
        "GATEWAY": GatewaySettings,
        "LLM": LlmSettings,
    }
    named = re.findall(r"CHIASM_([A-Z]+)_([A-Z_]+)=", TEXT)
    assert len(named) > 10
    for service, name in named:
        assert name.lower() in kinds[service].model_fields, f"CHIASM_{service}_{name}"


def test_every_copied_path_is_let_through_to_the_build() -> None:
    ignored = (build.REPOSITORY / ".containerignore").read_text(encoding="utf-8").splitlines()
    let_through = [line[1:] for line in ignored if line.startswith("!")]
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.MULTILINE)
        for word in line.split()[:-1]
    ] + re.findall(r"source=([^,]+),", TEXT)
    assert "chiasm" in copied
    for path in copied:
        assert any(path == name or path.startswith(f"{name}/") for name in let_through), path
