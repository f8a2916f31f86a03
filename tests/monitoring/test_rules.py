"""The shipped rules: promtool reads them, their tests hold, they ask for what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.page import documented
from tests.monitoring.prometheus import MONITORING, RULES, promtool

TESTS = sorted((MONITORING / "tests").glob("*.yaml"))
_NAME = re.compile(r"\b(?:chiasm|vllm)[_:][a-z0-9_:]+")


def rules_of(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


RECORDED = {one["record"] for path in RULES for one in rules_of(path) if "record" in one}
ALERTS = [one for path in RULES for one in rules_of(path) if "alert" in one]


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_promtool_reads_the_rules(path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", path)


def test_promtool_reads_the_configuration() -> None:
    assert "SUCCESS" in promtool("check", "config", MONITORING / "prometheus.yaml")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_the_rules_do_what_their_tests_say(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


@pytest.mark.parametrize(
    ("rule", "changed"),
    [("== 0\n        for: 1m", "== 7\n        for: 1m"), ("> 0.9\n", "> 0.96\n")],
    ids=["encoders", "blocks"],
)
def test_the_tests_of_the_rules_can_fail(tmp_path: Path, rule: str, changed: str) -> None:
    for path in (*RULES, MONITORING / "tests" / "alerts.yaml"):
        text = path.read_text()
        copy = tmp_path / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text.replace(rule, changed))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", tmp_path / "tests" / "alerts.yaml")


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    there = {name for metric in documented() for name in metric.series} | RECORDED
    asked = {
        name
        for path in RULES
        for rule in rules_of(path)
        for name in _NAME.findall(rule["expr"].replace('job=~"chiasm-', "").replace('"chiasm-', ""))
    }
    assert asked
    assert asked <= there


def test_every_alert_is_tested_for_firing_and_for_silence() -> None:
    tests = [one for path in TESTS for one in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fires == {alert["alert"] for alert in ALERTS}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    # These three are told of several series at once, of which only one fires.
    apart = {"ChiasmFirstTokenSlow", "ChiasmInterTokenSlow", "ChiasmRestarting"}
    assert silent | apart == fires


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_to_do(alert: dict[str, Any]) -> None:
    said = alert["annotations"]
    assert set(said) == {"summary", "description", "runbook"}
    assert all(said[name].endswith(".") for name in ("summary", "description"))
    assert said["runbook"] == f"docs/operations.md#alert-{alert['alert'].lower()}"
    assert alert["labels"]["severity"] in {"critical", "warning"}
