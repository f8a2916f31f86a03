"""docs/operations.md says what the code, the rules and the command say."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from chiasm.cli import main
from chiasm.settings import Settings
from encoder_service.settings import EncoderSettings
from gateway.settings import GatewaySettings
from llm_service.settings import LlmSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
RULES = ROOT / "deploy" / "monitoring" / "rules" / "alerts.yaml"
CLASSES: dict[str, type[Settings]] = {
    "G": GatewaySettings, "L": LlmSettings, "E": EncoderSettings,
}  # fmt: skip
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def sections() -> dict[str, str]:
    """The text under each heading of an alert."""
    parts = re.split(r"^### (alert-[a-z]+)$", PAGE, flags=re.MULTILINE)
    return {
        name: text.split("\n## ")[0] for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_each_alert_has_a_section_with_steps_and_no_section_is_left_over() -> None:
    assert {f"alert-{rule['alert'].lower()}" for rule in alerts()} == sections().keys()
    for rule in alerts():
        anchor = f"alert-{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{anchor}"
        assert f"**{rule['alert']}**" in sections()[anchor]
        assert "\n1. " in sections()[anchor]


def rows() -> list[tuple[str, str, str]]:
    """Setting, process and default (none in the second table) of each row about a setting."""
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"`--[a-z-]+`", cells[0]) and re.fullmatch(r"[GLE](, [GLE])*", cells[1]):
            name = cells[0].strip("`-").replace("-", "_")
            default = cells[2] if len(cells) == 4 else ""
            found += [(name, of, default) for of in cells[1].split(", ")]
    return found


def test_every_setting_stands_in_one_row_and_every_row_is_a_setting() -> None:
    listed = [(name, of) for name, of, _ in rows()]
    assert len(listed) == len(set(listed))
    assert set(listed) == {
        (name, of) for of, settings in CLASSES.items() for name in settings.model_fields
    }


def test_every_bound_number_that_is_a_limit_has_its_default() -> None:
    for name, of, default in rows():
        field = CLASSES[of].model_fields[name]
        number = type(field.default) in (int, float)
        if number and name not in {"port", "trace_ratio"}:
            assert value_of(default) == field.default, (name, of)


def value_of(text: str) -> float:
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * _UNITS.get(unit, 1)


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = PAGE.split("```\n")
    words = shlex.split(blocks[1].replace("\\\n", ""))
    assert words[0] == "chiasm"
    assert main(words[1:]) == 0
    assert capsys.readouterr().out == blocks[3]


def test_flags_of_the_plan_on_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    about = PAGE.split("## Sizing")[1].split("\n## ")[0]
    services = {
        f"--{name.replace('_', '-')}" for one in CLASSES.values() for name in one.model_fields
    }
    assert set(re.findall(r"`(--[a-z-]+)", about)) <= known | services
