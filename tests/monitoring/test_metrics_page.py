"""docs/metrics.md says what the code counts: names, kinds, labels and their values."""

import re
from typing import get_args

import pytest

from chiasm.errors import TABLE, ChiasmError, Reason
from chiasm.tracing.metrics import CAUSES
from chiasm.v1 import encoder_service_pb2, llm_service_pb2
from encoder_service import batcher, single_flight
from encoder_service.settings import EncoderSettings
from gateway.app import _ROUTES
from gateway.metrics import route_of
from gateway.settings import GatewaySettings
from llm_service.engine.values import FinishReason
from llm_service.holding import holding, memory
from llm_service.metrics import STAGES
from llm_service.settings import LlmSettings
from llm_service.vision import attempts, standing
from tests.monitoring.page import PAGE, Metric, counted, documented, documented_values, rows_of

REASONS = {str(reason) for reason in Reason}
ROUTES = {route_of(path) for path in (*(one.path for one in _ROUTES), "/", "/made/up")}
CALLS = "chiasm_rpc_calls_total"
REQUESTS = "chiasm_gateway_requests_total"
ENDS = {*get_args(FinishReason), "tool_calls"}
SERVICES = (
    *llm_service_pb2.DESCRIPTOR.services_by_name.values(),
    *encoder_service_pb2.DESCRIPTOR.services_by_name.values(),
)
SOURCES = set(llm_service_pb2.ImageSource.keys()) - {"IMAGE_SOURCE_UNSPECIFIED"}
VALUES: dict[tuple[str, str], set[str]] = {
    ("route", REQUESTS): {"/v1/models/{id}" if "{" in one else one for one in ROUTES},
    ("status", CALLS): {"OK"} | {outcome.grpc.name for outcome in TABLE.values()},
    ("reason", CALLS): REASONS,
    ("method", CALLS): {method.name for service in SERVICES for method in service.methods},
    ("source", "chiasm_llm_images_total"): {
        source.removeprefix("IMAGE_SOURCE_").lower() for source in SOURCES
    },
    ("reason", REQUESTS): {"RATE_LIMIT"},
    ("reason", "chiasm_llm_finished_choices_total"): ENDS,
    ("stage", "chiasm_llm_stage_seconds"): set(STAGES),
    ("stage", "chiasm_encoder_stage_seconds"): {"queue", "preprocess", "forward", "reply"},
    ("stage", "chiasm_encoder_dropped_total"): set(get_args(batcher.Stage)),
    ("cause", "chiasm_encoder_dropped_total"): set(get_args(batcher.Cause)),
    ("cause", "chiasm_llm_encoder_ejections_total"): {str(one) for one in standing.Cause},
    ("cause", "chiasm_llm_references_dropped_total"): set(get_args(memory.Cause)),
    ("cause", "chiasm_trace_dropped_spans_total"): set(CAUSES),
    ("state", "chiasm_llm_encoders"): set(get_args(standing.State)),
    ("found", "chiasm_llm_reference_lookups_total"): set(get_args(holding.Found)),
    ("result", "chiasm_encoder_cache_lookups_total"): {one.value for one in single_flight.Source},
}


def test_the_page_has_every_metric_of_the_code_and_no_other() -> None:
    assert documented() == counted()


def test_no_metric_stands_twice_and_each_says_what_it_means() -> None:
    rows = list(rows_of(PAGE.read_text(), "name"))
    assert len({row[0] for row in rows}) == len(rows)
    assert all(len(row) == 5 and row[3].rstrip(")").endswith((".", "`")) for row in rows)


def test_every_label_of_every_metric_has_its_values() -> None:
    for metric in documented():
        for label in metric.labels:
            if (label, metric.name) != ("model", "chiasm_model_info"):
                assert documented_values(label, metric.name), metric


@pytest.mark.parametrize(("label", "metric"), VALUES.keys())
def test_the_values_are_those_of_the_code(label: str, metric: str) -> None:
    assert documented_values(label, metric) == VALUES[label, metric]


def test_outcomes_of_attempts_are_those_that_a_judgement_may_have() -> None:
    told = [ChiasmError(reason, "x") for reason in Reason]
    errors = [attempts.Silence(), attempts.Lie(told[0]), *told]
    labels = {attempts.judge(error).label for error in errors}
    page = documented_values("outcome", "chiasm_llm_encoder_attempts_total")
    assert page == labels | {"answered"}


def test_flags_on_the_page_exist() -> None:
    fields = {
        f"--{name.replace('_', '-')}"
        for settings in (EncoderSettings, GatewaySettings, LlmSettings)
        for name in settings.model_fields
    }
    assert set(re.findall(r"`(--[a-z-]+)", PAGE.read_text())) <= fields


def test_the_code_is_read_in_each_of_its_ways() -> None:
    assert Metric("chiasm_rpc_calls_total", "counter", ("method", "reason", "status")) in counted()
    assert Metric("chiasm_llm_kv_blocks", "gauge", ()) in counted()
    assert Metric("chiasm_encoder_stage_seconds", "histogram", ("stage",)) in counted()
    assert Metric("chiasm_llm_encoders", "gauge", ("state",)) in counted()
    assert Metric("chiasm_llm_encoder_outstanding_rows", "gauge", ()) in counted()
