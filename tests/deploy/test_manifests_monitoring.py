"""What watches and scales: the copy of the rules, job names, and the autoscaler's metric."""

import json
import re
import subprocess
import sys
from typing import Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deploy import prometheus_rules
from encoder_service.metrics import EncoderMetrics
from encoder_service.settings import EncoderSettings
from tests.deploy.manifests import DEPLOY, PARTS, needs_kubectl, overlay
from tests.deploy.pod_settings import settings_of

ADAPTER: Final = DEPLOY / "components/autoscale-hpa/prometheus-adapter.yaml"


def test_the_component_has_the_rules_as_they_are() -> None:
    written = prometheus_rules.WRITTEN.read_text(encoding="utf-8")
    assert written == prometheus_rules.text(), "run python -m deploy.prometheus_rules"


def test_two_groups_of_one_name_are_refused(tmp_path: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("groups: [{name: same, rules: []}]")
    with pytest.raises(ValueError, match="two groups of one name"):
        prometheus_rules.prometheus_rule(tmp_path)


def test_alerts_link_the_guide_where_an_operator_can_read_it(tmp_path: Any) -> None:
    file = tmp_path / "rules.yaml"
    sent = ["--runbooks", "https://git.example/chiasm/", "--output", str(file)]
    subprocess.run([sys.executable, "-m", "deploy.prometheus_rules", *sent], check=True)
    groups = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts
    for alert in alerts:
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page == "https://git.example/chiasm/docs/operations.md"
        assert anchor == f"alert-{alert['alert'].lower()}"


@needs_kubectl
def test_scrapes_have_the_jobs_that_the_rules_ask_for() -> None:
    jobs = {
        relabeling["replacement"]
        for monitor in overlay("prod").of("PodMonitor")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for relabeling in endpoint["relabelings"]
        if relabeling["targetLabel"] == "job"
    }
    assert jobs == {f"chiasm-{part}" for part in PARTS}
    rules = json.dumps(list(overlay("prod").of("PrometheusRule")))
    asked = re.findall(r'job=~?\\"([^\\]+)\\"', rules)
    assert asked
    for pattern in asked:
        assert any(re.fullmatch(pattern, job) for job in jobs), pattern


@needs_kubectl
def test_scrapes_ask_the_port_and_path_of_the_process() -> None:
    cluster = overlay("prod")
    assert settings_of(cluster, cluster.deployment("gateway")).open_metrics
    for monitor in cluster.of("PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        gateway = monitor["metadata"]["name"] == "chiasm-gateway"
        assert endpoint["port"] == ("http" if gateway else "metrics")
        assert endpoint["path"] == "/metrics"


@needs_kubectl
def test_the_dashboard_is_the_file() -> None:
    (shown,) = [
        one
        for one in overlay("prod").of("ConfigMap")
        if "grafana_dashboard" in one["metadata"]["labels"]
    ]
    file = (DEPLOY / "monitoring/dashboard.json").read_text(encoding="utf-8")
    assert shown["data"] == {"chiasm.json": file}


@needs_kubectl
def test_the_autoscaler_asks_for_a_metric_that_encoders_have() -> None:
    (scaler,) = overlay("prod").of("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    registry = CollectorRegistry()
    EncoderMetrics(registry)
    found = {family.name: family.type for family in registry.collect()}
    assert found[name] == "gauge"
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(f"{name}{{")


@needs_kubectl
def test_the_autoscaler_wants_more_when_a_full_batch_waits() -> None:
    cluster = overlay("prod")
    (scaler,) = cluster.of("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    settings: EncoderSettings = settings_of(cluster, cluster.deployment("encoder"))
    assert int(metric["pods"]["target"]["averageValue"]) == settings.max_batch_patches
