"""What docs/metrics.md says, and what the code counts, in one form."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from encoder_service.metrics import EncoderMetrics
from llm_service.engine.values import EngineStats
from llm_service.metrics import EngineCollector
from llm_service.vision.fleet_metrics import FleetMetrics

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
_PACKAGES = ("chiasm", "gateway", "llm_service", "encoder_service")
_KINDS = {
    "Counter": "counter",
    "Gauge": "gauge",
    "Histogram": "histogram",
    "CounterMetricFamily": "counter",
    "GaugeMetricFamily": "gauge",
}
_CODE = re.compile(r"`([^`]+)`")
_NO_STATS = EngineStats(0, 0, 0, 1, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Metric:
    """One metric: its name as it is asked for, its kind, its labels in order of the alphabet."""

    name: str
    kind: str
    labels: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which its samples stand."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


def rows_of(text: str, heading: str) -> Iterator[list[str]]:
    """The cells of every row of the tables whose first column is headed `heading`."""
    inside = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == heading:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            yield cells


def documented() -> set[Metric]:
    """The metrics of the page."""
    return {
        Metric(_CODE.findall(row[0])[0], row[1], tuple(sorted(_CODE.findall(row[2]))))
        for row in rows_of(PAGE.read_text(), "name")
    }


def documented_values(label: str, metric: str) -> set[str]:
    """The values that the page gives to a label of a metric."""
    (cell,) = (
        row[2]
        for row in rows_of(PAGE.read_text(), "label")
        if _CODE.findall(row[0]) == [label] and metric in _CODE.findall(row[1])
    )
    return set(_CODE.findall(cell))


def counted() -> set[Metric]:
    """The metrics of the code: all whose name stands there in full, and those of the places that
    make up their names."""
    return {*_written(), *_made()}


def _written() -> Iterator[Metric]:
    for package in _PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    yield from _metric_of(node, node.func.id)


def _metric_of(call: ast.Call, function: str) -> Iterator[Metric]:
    first = call.args[0] if call.args else None
    kind = _KINDS.get(function)
    if kind and isinstance(first, ast.Constant) and str(first.value).startswith("chiasm_"):
        yield _named(str(first.value), kind, _labels_of(call, function))


def _labels_of(call: ast.Call, function: str) -> object:
    named = [one.value for one in call.keywords if one.arg in {"labels", "labelnames"}]
    # The third of a family's is its value.
    third = [] if function.endswith("Family") else call.args[2:3]
    found = [*named, *third]
    return ast.literal_eval(found[0]) if found else ()


def _made() -> Iterator[Metric]:
    registry = CollectorRegistry()
    EncoderMetrics(registry)
    FleetMetrics(registry)
    for one in list(registry._collector_to_names):
        assert isinstance(one, MetricWrapperBase)
        yield _named(one._name, str(one._type), one._labelnames)
    for family in EngineCollector(lambda: _NO_STATS).collect():
        yield _named(family.name, family.type, ())


def _named(name: str, kind: str, labels: object) -> Metric:
    assert isinstance(labels, list | tuple | set)
    whole = f"{name.removesuffix('_total')}_total" if kind == "counter" else name
    return Metric(whole, kind, tuple(sorted(labels)))
