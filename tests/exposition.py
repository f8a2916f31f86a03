"""The text of a `/metrics`, read by Prometheus's own reader, and the rules that names keep to."""

import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# Bounds of a histogram and parts of a sample: no labels of ours.
_GIVEN_LABELS = {"le"}
# https://prometheus.io/docs/practices/naming/: base units, in the plural, at the end.
_WRONG_UNITS = re.compile(r"_(ms|millis|milliseconds|minutes|kb|mb|mib|percent|second|byte)(_|$)")


@dataclass(frozen=True)
class Family:
    """One metric: its kind, and the values that each of its labels has."""

    kind: str
    help: str
    labels: dict[str, frozenset[str]]
    # Whether there is any sample; a metric with labels has none before it first counts.
    sampled: bool


def ours(text: str) -> dict[str, Family]:
    """The metrics of Chiasm by the names under which they are asked for."""
    found = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("chiasm_") or family.name.endswith("_created"):
            continue
        values: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label not in _GIVEN_LABELS:
                    values.setdefault(label, set()).add(value)
        labels = {label: frozenset(those) for label, those in values.items()}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = Family(family.type, family.documentation, labels, bool(family.samples))
    return found


Shape = tuple[str, tuple[str, ...]]


def check_shapes(families: dict[str, Family], expected: dict[str, Shape]) -> None:
    """Raises AssertionError unless there are these names, of these kinds, with these labels."""
    assert families.keys() == expected.keys()
    for name, family in families.items():
        kind, labels = expected[name]
        assert family.kind == kind, name
        assert tuple(sorted(family.labels)) == (labels if family.sampled else ()), name


def check_names(families: dict[str, Family]) -> None:
    """Raises AssertionError where a name breaks Prometheus's rules."""
    for name, family in families.items():
        assert re.fullmatch(r"chiasm(_[a-z0-9]+)+", name), name
        assert (family.kind == "counter") == name.endswith("_total"), name
        assert family.kind != "unknown", name
        assert family.help.endswith("."), name
        assert not _WRONG_UNITS.search(name.removesuffix("_total")), name
        if family.kind == "histogram" and "seconds" in family.help.lower():
            assert name.endswith("_seconds"), name
