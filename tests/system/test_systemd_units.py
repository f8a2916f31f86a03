"""The systemd units: what systemd says of them, and that their commands start as documented."""

import configparser
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chiasm.settings import Settings
from encoder_service.settings import EncoderSettings
from gateway.settings import GatewaySettings
from llm_service.settings import LlmSettings
from tests.system.processes import DEMO_MODEL, ROOT, Process

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]
UNITS = {
    "encoder": EncoderSettings,
    "llm": LlmSettings,
    "gateway": GatewaySettings,
}
PYTHON = "/opt/chiasm/.venv/bin/python"
PAGE = (ROOT / "docs" / "single-machine.md").read_text()


def unit(name: str) -> Path:
    return ROOT / "deploy" / "systemd" / f"chiasm-{name}.service"


def service(name: str) -> configparser.SectionProxy:
    parsed = configparser.ConfigParser(strict=True, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(unit(name))
    return parsed["Service"]


def command(name: str) -> list[str]:
    words = service(name)["ExecStart"].split()
    assert words[0] == PYTHON
    return words[1:]


def documented_settings(name: str) -> dict[str, str]:
    """The variables that the page writes into the unit's file."""
    file = service(name)["EnvironmentFile"]
    line = re.search(rf"printf '(.*)' > {re.escape(file)}$", PAGE, re.MULTILINE)
    assert line, file
    pairs = [one.partition("=") for one in line[1].split("\\n") if one]
    return {key: str(DEMO_MODEL) if value == "/srv/model" else value for key, _, value in pairs}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_understands_each_unit(name: str, tmp_path: Path) -> None:
    # It looks for the program that is started.
    copy = tmp_path / unit(name).name
    copy.write_text(unit(name).read_text().replace(PYTHON, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_each_unit_starts_with_the_settings_of_the_page_and_stops_in_time(name: str) -> None:
    extra = {f"CHIASM_{name.upper()}_PORT": "0", f"CHIASM_{name.upper()}_DRAIN_SECONDS": "0"}
    with Process(*command(name), environment={**documented_settings(name), **extra}) as process:
        wait_ready(process)
        process.terminate()
        assert process.wait() == 0


@pytest.mark.parametrize("name", UNITS)
def test_a_refused_setting_is_not_restarted(name: str) -> None:
    wrong = {f"CHIASM_{name.upper()}_PORT": "a"}
    with Process(*command(name), environment={**documented_settings(name), **wrong}) as process:
        assert process.wait(60) == int(service(name)["RestartPreventExitStatus"])


@pytest.mark.parametrize(("name", "settings"), UNITS.items())
def test_systemd_waits_longer_than_a_stop_takes(name: str, settings: type[Settings]) -> None:
    fields = settings.model_fields
    longest = fields["drain_seconds"].default + fields["grace_seconds"].default
    assert int(service(name)["TimeoutStopSec"]) > longest


def wait_ready(process: Process) -> None:
    deadline = time.monotonic() + 90
    while '"ready"' not in process.out():
        assert process.alive, process.log()
        assert time.monotonic() < deadline, process.log()
        time.sleep(0.05)
