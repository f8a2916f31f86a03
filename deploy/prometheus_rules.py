"""Writes the rules of `deploy/monitoring/rules` as the PrometheusRule of the monitoring component.

    python -m deploy.prometheus_rules

Kustomize cannot read a YAML file into a field, hence the copy; a test compares the two.
"""

from pathlib import Path
from typing import Any, Final

import yaml

_DEPLOY: Final = Path(__file__).parent
RULES: Final = _DEPLOY / "monitoring" / "rules"
WRITTEN: Final = _DEPLOY / "components" / "monitoring" / "rules.yaml"
_NOTE: Final = "# Written by python -m deploy.prometheus_rules from deploy/monitoring/rules.\n"


def prometheus_rule(folder: Path) -> dict[str, Any]:
    """One PrometheusRule with the groups of every rule file in `folder`, files by name.

    Raises ValueError for two groups of one name, which Prometheus would take from one file only.
    """
    groups = [
        group
        for path in sorted(folder.glob("*.yaml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    names = [group["name"] for group in groups]
    if len(set(names)) < len(names):
        raise ValueError(f"two groups of one name in {folder}: {', '.join(sorted(names))}")
    labels = {"app.kubernetes.io/name": "chiasm", "app.kubernetes.io/part-of": "chiasm"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "chiasm", "labels": labels},
        "spec": {"groups": groups},
    }


def text() -> str:
    """What belongs in the component's file."""
    rule = prometheus_rule(RULES)
    return _NOTE + yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=100)


if __name__ == "__main__":
    WRITTEN.write_text(text(), encoding="utf-8")
