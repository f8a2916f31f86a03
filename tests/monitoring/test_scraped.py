"""A real Prometheus with the shipped rules and dashboard, before the three real services."""

import time
from collections.abc import Iterator

import httpx
import pytest

from chiasm.conversation import user
from tests.monitoring.page import documented
from tests.monitoring.prometheus import Prometheus, program, prometheus
from tests.monitoring.test_dashboard import expressions, names_in
from tests.system.processes import SAMPLES
from tests.system.three import Three

pytestmark = pytest.mark.system

ASKED = 3
PICTURE = (SAMPLES / "star.png").read_bytes()
# What nothing happens to here: no fault, no picture by URL, no mTLS.
QUIET = {
    "chiasm_gateway_picture_downloads_total",
    "chiasm_mtls_certificate_expiry_seconds",
    "chiasm:server_errors:ratio_rate5m",
    "chiasm:refused:ratio_rate5m",
}


@pytest.fixture(scope="module")
def scraping(
    logged: Three, tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: object
) -> Iterator[Prometheus]:
    """A Prometheus that has seen `ASKED` answers about one picture, and a failure."""
    program("prometheus")
    assert callable(unused_tcp_port_factory)
    targets = {
        "chiasm-gateway": logged.gateway.metrics_port,
        "chiasm-llm": logged.llm.metrics_port,
        "chiasm-encoder": logged.encoder.metrics_port,
    }
    directory = tmp_path_factory.mktemp("prometheus")
    with prometheus(directory, unused_tcp_port_factory(), targets) as server:
        _until(server, "sum(up)", 3)
        before = server.value("sum(chiasm_llm_answer_seconds_count)")
        for _ in range(ASKED):
            _ask(logged, PICTURE, 200)
        _ask(logged, PICTURE[: len(PICTURE) // 2], 400)
        _until(server, "sum(vllm:e2e_request_latency_seconds_count)", before + ASKED)
        yield server


def _ask(system: Three, picture: bytes, status: int) -> None:
    body = system.body([user(picture, "Describe the picture.")], stream=True)
    with httpx.Client(base_url=system.gateway.url, timeout=60, trust_env=False) as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text


def _until(server: Prometheus, expression: str, least: float) -> None:
    until = time.monotonic() + 30
    while not server.value(expression) >= least:
        assert time.monotonic() < until, (expression, server.value(expression), least)
        time.sleep(0.2)


def test_recorded_series_have_the_services_figures_under_the_models_name(
    logged: Three, scraping: Prometheus
) -> None:
    model = f'model_name="{logged.model}"'
    ended = scraping.value(f"sum(vllm:request_success_total{{{model}}})")
    assert ended == scraping.value("sum(chiasm_llm_finished_choices_total)") >= ASKED
    stopped = scraping.value(f'vllm:request_success_total{{{model}, finished_reason="stop"}}')
    assert stopped >= ASKED
    tokens = scraping.value(f"vllm:generation_tokens_total{{{model}}}")
    assert tokens == scraping.value("chiasm_llm_generated_tokens_total") > ASKED
    assert scraping.value(f"vllm:num_requests_running{{{model}}}") == 0
    assert 0 <= scraping.value(f"vllm:kv_cache_usage_perc{{{model}}}") <= 1
    first = f"histogram_quantile(0.5, vllm:time_to_first_token_seconds_bucket{{{model}}})"
    assert 0 < scraping.value(first) < 60


def test_stages_and_tokens_add_up(scraping: Prometheus) -> None:
    answers = "chiasm_llm_answer_seconds_sum"
    stages = scraping.value("sum(chiasm_llm_stage_seconds_sum)")
    assert 0.5 * scraping.value(answers) < stages <= scraping.value(answers) * 1.01
    between = scraping.value("chiasm_llm_inter_token_seconds_count")
    assert 0 < between < scraping.value("chiasm_llm_generated_tokens_total")
    received = scraping.value("chiasm_llm_encoder_received_bytes_total")
    assert received == scraping.value("chiasm_encoder_sent_bytes_total") > 0
    assert scraping.value("chiasm_llm_encoder_transfer_seconds_count") >= 1


def test_every_panel_has_data(scraping: Prometheus) -> None:
    # Rates want two samples of a series, and the youngest came with the failure.
    for job in ("chiasm-llm", "chiasm-encoder"):
        failed = f'count(rate(chiasm_rpc_calls_total{{reason!="", job="{job}"}}[1m]))'
        _until(scraping, failed, 1)
    for expression in expressions():
        found = scraping.ask(expression)
        assert found or names_in(expression) & QUIET, expression


def test_every_rule_is_evaluated_and_nobody_is_alarmed(scraping: Prometheus) -> None:
    told = httpx.get(f"{scraping.url}/api/v1/rules", trust_env=False).json()
    rules = [rule for group in told["data"]["groups"] for rule in group["rules"]]
    assert len(rules) > 50
    assert {rule["name"] for rule in rules if rule["health"] == "err"} == set()
    assert [rule["name"] for rule in rules if rule.get("alerts")] == []


def test_what_is_scraped_is_what_the_page_lists(scraping: Prometheus) -> None:
    with httpx.Client(base_url=scraping.url, trust_env=False) as http:
        names = set(http.get("/api/v1/label/__name__/values").json()["data"])
        told = http.get("/api/v1/targets/metadata", params={"limit": 10_000}).json()["data"]
    kinds = {one["metric"]: one["type"] for one in told if one["metric"].startswith("chiasm_")}
    # In one of the two formats that they are scraped in, counters are named without their ending.
    there = {name.removesuffix("_total"): kinds[name] for name in kinds if not _created(name)}
    page = {metric.name.removesuffix("_total"): metric.kind for metric in documented()}
    assert there.items() <= page.items()
    optional = {name for name in page if name.startswith(("chiasm_mtls_", "chiasm_trace_"))}
    assert page.keys() - there.keys() <= optional
    assert "up" in names


def _created(name: str) -> bool:
    return name.endswith("_created")
