"""The shipped dashboard: of Grafana's form, and every expression reads what there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.page import documented
from tests.monitoring.prometheus import MONITORING, promtool
from tests.monitoring.test_rules import RECORDED

DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
# Of the units that Grafana knows: https://github.com/grafana/grafana, valueFormats/categories.ts
UNITS = {"s", "bytes", "Bps", "percentunit", "short", "reqps", "cps"}
OF_THE_PROCESS = {
    "up",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
}


def expressions() -> list[str]:
    """All expressions, with Grafana's variables filled in."""
    found = [target["expr"] for panel in GRAPHS for target in panel["targets"]]
    return [one.replace("$__rate_interval", "1m").replace("$namespace", ".*") for one in found]


def names_in(expression: str) -> set[str]:
    """The metrics that an expression asks for: each is followed by its labels here."""
    return set(re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{", expression))


def test_it_has_the_rows_that_an_operator_looks_for() -> None:
    titles = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert titles == [
        "Traffic and outcomes", "Latency", "Pictures", "Encoders", "Engine", "Processes",
    ]  # fmt: skip


def test_panels_are_apart_and_whole() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
def test_a_panel_has_a_unit_a_source_and_a_legend(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert target["legendFormat"]


def test_it_is_for_any_prometheus() -> None:
    assert "id" not in DASHBOARD
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"


def test_it_asks_for_metrics_that_there_are() -> None:
    there = {name for metric in documented() for name in metric.series}
    for expression in expressions():
        assert names_in(expression), expression
        assert names_in(expression) <= there | RECORDED | OF_THE_PROCESS, expression


def test_every_metric_that_tells_of_trouble_is_on_it() -> None:
    shown = {name for expression in expressions() for name in names_in(expression)}
    counters = {metric.name for metric in documented() if metric.kind == "counter"}
    unseen = {
        # Seen in the logs, or of interest only beside an alert.
        "chiasm_encoder_cache_evictions_total",
        "chiasm_encoder_encoded_images_total",
        "chiasm_llm_embedding_cache_evictions_total",
        "chiasm_llm_reference_store_failures_total",
        "chiasm_llm_references_dropped_total",
        "chiasm_mtls_refused_calls_total",
        "chiasm_mtls_reloads_total",
        "chiasm_trace_dropped_spans_total",
        "chiasm_trace_exported_spans_total",
    }
    assert counters - shown <= unseen


def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": one} for n, one in enumerate(expressions())]
    file = tmp_path / "expressions.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", file)
