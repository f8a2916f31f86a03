"""Writes the rules of `deploy/monitoring/rules` as the PrometheusRule of the monitoring component.

    python -m deploy.prometheus_rules [--runbooks URL] [--output FILE]

Kustomize cannot read a YAML file into a field, hence the copy; a test compares the two. Each alert
names its section of the operations guide, from this repository's root (`runbook`). Alertmanager and
Grafana make a link of `runbook_url` alone, which needs to know where the guide can be read.
"""

import argparse
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


def with_links(rule: dict[str, Any], runbooks: str) -> dict[str, Any]:
    """`rule` whose alerts have a `runbook_url`, the repository's files being under `runbooks`."""
    groups = [
        {**group, "rules": [_linked(one, runbooks) for one in group["rules"]]}
        for group in rule["spec"]["groups"]
    ]
    return {**rule, "spec": {"groups": groups}}


def _linked(rule: dict[str, Any], runbooks: str) -> dict[str, Any]:
    said = rule.get("annotations", {})
    if "runbook" not in said:
        return rule
    link = f"{runbooks.rstrip('/')}/{said['runbook']}"
    return {**rule, "annotations": {**said, "runbook_url": link}}


def text(runbooks: str | None = None) -> str:
    """What belongs in the component's file."""
    rule = prometheus_rule(RULES)
    if runbooks is not None:
        rule = with_links(rule, runbooks)
    return _NOTE + yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=100)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.prometheus_rules",
        description="Writes the alert and recording rules as a PrometheusRule of Kubernetes.",
    )
    parser.add_argument(
        "--runbooks",
        metavar="URL",
        help="where this repository's files can be read, such as https://git.example/chiasm/blob/v1:"
        " each alert then links its section of the operations guide",
    )
    parser.add_argument(
        "--output", type=Path, default=WRITTEN, metavar="FILE", help="(%(default)s)"
    )
    asked = parser.parse_args()
    asked.output.write_text(text(asked.runbooks), encoding="utf-8")


if __name__ == "__main__":
    main()
