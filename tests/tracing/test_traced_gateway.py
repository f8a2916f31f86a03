"""Traces of a real gateway process before a scripted LLM service, sent to a real collector."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from chiasm import settings
from chiasm.errors import ChiasmError, Reason
from gateway.settings import GatewaySettings
from tests.gateway.raw_http import request, wired
from tests.gateway.test_gateway_process import gateway_process
from tests.scripted_llm import MODEL, Script, ScriptedLlm
from tests.tracing.collector import Collector, collecting

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{CALLER}-01"
CHATS = "/v1/chat/completions"
PROMPT = "a prompt that nobody else may read"
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}


@dataclass
class Traced:
    """A gateway that sends its spans to `collector`."""

    llm: ScriptedLlm
    process: Process
    http: httpx.AsyncClient
    port: int

    async def stop(self) -> tuple[float, list[dict[str, Any]]]:
        """Seconds that it took to end, and the lines of its log."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        _, logged = await asyncio.wait_for(self.process.communicate(), 20)
        assert self.process.returncode == 0
        return time.monotonic() - began, [json.loads(line) for line in logged.splitlines()]


@asynccontextmanager
async def traced_gateway(endpoint: str, *flags: str) -> AsyncIterator[Traced]:
    llm = ScriptedLlm()
    more = ("--trace-endpoint", endpoint, "--drain-seconds", "0", *flags)
    async with (
        llm.serving() as server,
        gateway_process("--llm", f"127.0.0.1:{server.port}", *more) as (process, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
    ):
        yield Traced(llm, process, http, port)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as open_one:
        yield open_one


async def test_requests_and_probes_as_the_collector_sees_them(collector: Collector) -> None:
    llm_full = Script(refusal=ChiasmError(Reason.QUEUE_FULL, PROMPT))
    llm_broken = Script(end=None)
    async with traced_gateway(collector.endpoint) as gateway:
        http = gateway.http
        headers = {"traceparent": PARENT, "tracestate": "rojo=1,congo=2"}
        await http.post(CHATS, json=ASK, headers=headers)
        carried = gateway.llm.last
        unsampled = {"traceparent": PARENT[:-1] + "0", "tracestate": "rojo=1"}
        await http.post(CHATS, json=ASK, headers=unsampled)
        carried_unsampled = gateway.llm.last
        malformed = {"traceparent": PARENT + "-more", "tracestate": "rojo=1"}
        await http.post(CHATS, json=ASK, headers=malformed)
        carried_new = gateway.llm.last
        for script, ask in (
            (llm_full, ASK),
            (llm_broken, ASK),
            (llm_broken, ASK | {"stream": True}),
            (Script(), ASK | {"n": 0}),
        ):
            gateway.llm.script = script
            await http.post(CHATS, json=ask)
        for probe in ("/health", "/ready", "/metrics"):
            await http.get(probe)
        _, lines = await gateway.stop()
    seen = collector.spans()
    served = [one for one in seen if one.service == "chiasm-gateway"]
    assert len(served) == 6
    assert {one.name for one in served} == {"POST /v1/chat/completions"}

    (called,) = [one for one in served if one.trace == TRACE]
    assert called.parent == CALLER
    assert called.span.trace_state == "rojo=1,congo=2"
    assert carried.trace_parent == f"00-{TRACE}-{called.id}-01"
    assert carried.trace_state == "rojo=1,congo=2"
    assert called.attributes == {
        "chiasm.request.id": carried.request_id,
        "http.request.method": "POST",
        "http.route": CHATS,
        "http.response.status_code": 200,
    }
    assert carried_unsampled.trace_parent.startswith(f"00-{TRACE}-")
    assert carried_unsampled.trace_parent.endswith("-00")
    assert carried_unsampled.trace_state == "rojo=1"

    (new,) = [one for one in served if one.id in carried_new.trace_parent]
    assert new.trace != TRACE and new.parent == "" and carried_new.trace_state == ""

    ends = [(one.attributes["http.response.status_code"], one.attributes.get("error.type"),
             one.failed) for one in served]  # fmt: skip
    assert ends == [
        (200, None, False), (200, None, False), (429, "QUEUE_FULL", False),
        (500, "INTERNAL", True), (200, "INTERNAL", True), (400, "REQUEST_INVALID", False),
    ]  # fmt: skip
    logged = [line for line in lines if line["event"] == "request"]
    assert len(logged) == 7
    ids = {one.id: one.trace for one in served}
    with_span = {line["span_id"]: line["trace_id"] for line in logged if "span_id" in line}
    assert with_span == ids
    (quiet,) = [line for line in logged if "span_id" not in line]
    assert quiet["trace_id"] == TRACE
    assert not any(PROMPT in str(one.span) for one in seen)


async def test_the_span_of_a_stream_lasts_to_its_end_or_till_its_reader_leaves(
    collector: Collector,
) -> None:
    async with traced_gateway(collector.endpoint) as gateway:
        gateway.llm.script = Script(texts=("a", "b", "c"), pause_seconds=0.1)
        await gateway.http.post(CHATS, json=ASK | {"stream": True})
        gateway.llm.script = Script(texts=("a",) * 600, pause_seconds=0.1)
        async with wired(gateway.port) as wire:
            body = json.dumps(ASK | {"stream": True}).encode()
            await wire.send(request("POST", CHATS, body))
            await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)
        await gateway.stop()
    whole, left = collector.spans()
    seconds = [(one.span.end_time_unix_nano - one.span.start_time_unix_nano) / 1e9
               for one in (whole, left)]  # fmt: skip
    assert seconds[0] >= 0.3
    assert 0.3 < seconds[1] < 5
    assert not whole.failed and not left.failed


async def test_a_ratio_of_zero_sends_nothing_and_still_names_the_trace(
    collector: Collector,
) -> None:
    async with traced_gateway(collector.endpoint, "--trace-ratio", "0") as gateway:
        await gateway.http.post(CHATS, json=ASK)
        parent = gateway.llm.last.trace_parent
        _, lines = await gateway.stop()
    assert collector.spans() == []
    (line,) = [line for line in lines if line["event"] == "request"]
    assert parent == f"00-{line['trace_id']}-{parent[36:52]}-00"


@pytest.mark.parametrize("kind", ["absent", "hanging", "not a collector"])
async def test_requests_and_the_stop_do_not_wait_for_a_collector(kind: str) -> None:
    with socket.socket() as nobody, collecting() as hanging:
        nobody.bind(("127.0.0.1", 0))
        hanging.block()
        if kind == "not a collector":
            nobody.listen()
        port = hanging.port if kind == "hanging" else nobody.getsockname()[1]
        async with traced_gateway(f"http://127.0.0.1:{port}") as gateway:
            await gateway.http.post(CHATS, json=ASK)
            began = time.monotonic()
            for _ in range(20):
                answer = await gateway.http.post(CHATS, json=ASK)
                assert answer.status_code == 200
            assert time.monotonic() - began < 2
            # A batch is under way: the stop does not find an idle thread.
            await asyncio.sleep(1.2)
            seconds, _ = await gateway.stop()
    assert seconds < 3


async def test_lost_spans_are_counted_where_an_operator_looks(collector: Collector) -> None:
    async with traced_gateway(collector.endpoint) as gateway:
        await gateway.http.post(CHATS, json=ASK)
        collector.of_trace(gateway.llm.last.trace_parent[3:35], lambda seen: len(seen) == 1)
        told = (await gateway.http.get("/metrics")).text.splitlines()
    assert "chiasm_trace_exported_spans_total 1.0" in told
    assert 'chiasm_trace_dropped_spans_total{cause="export_failed"} 0.0' in told


WRONG_ENDPOINTS = [
    "", "127.0.0.1:4317", "grpc://host:4317", "http://host", "http://:4317",
    "http://user:secret@host:4317", "http://host:4317/v1/traces", "http://host:4317?x=1",
    "http://host:99999", "http://ho\tst:4317", "http://ho st:4317",
]  # fmt: skip


@pytest.mark.parametrize("endpoint", WRONG_ENDPOINTS)
def test_an_endpoint_that_cannot_be_ends_the_start(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.read(GatewaySettings, ["--trace-endpoint", endpoint], program="gateway")
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert "--trace-endpoint" in told and "http://host:port" in told
    assert "secret" not in told


@pytest.mark.parametrize("ratio", ["-0.1", "1.1", "nan", "many"])
def test_a_ratio_that_cannot_be_ends_the_start(
    ratio: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings.read(GatewaySettings, [f"--trace-ratio={ratio}"], program="gateway")
    assert ended.value.code == 2
    assert "--trace-ratio" in capsys.readouterr().err


def test_an_unusable_variable_of_opentelemetry_ends_the_start() -> None:
    wrong = {"OTEL_EXPORTER_OTLP_COMPRESSION": "brotli"}
    done = _started("--trace-endpoint", "http://127.0.0.1:4317", variables=wrong)
    assert done.returncode == 2
    assert "OTEL_" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("service", ["gateway", "llm_service", "encoder_service"])
def test_without_the_packages_the_flag_says_how_to_install_them(
    service: str, tmp_path: Path
) -> None:
    # As in an environment that has them not: an import fails.
    hidden = "import sys\nsys.modules['opentelemetry'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    model = [] if service == "gateway" else ["--model", str(tmp_path)]
    if service == "llm_service":
        model += ["--vision", "none"]
    done = _started(
        *model, "--trace-endpoint", "http://127.0.0.1:4317", service=service,
        variables={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "--trace-endpoint" in done.stderr and "pip install 'chiasm[tracing]'" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--trace-endpoint", "http://127.0.0.1:4317"]])
def test_opentelemetry_is_imported_where_traces_are_on_and_nowhere_else(flags: list[str]) -> None:
    # The port is taken: the process ends when everything is imported and it tries to listen.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = _started("--port", port, *flags, python=("-X", "importtime"))
    assert "cannot listen" in done.stderr
    assert "uvicorn" in done.stderr
    assert ("opentelemetry" in done.stderr.split("cannot listen")[0]) is bool(flags)


def _started(
    *flags: str,
    service: str = "gateway",
    python: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *python, "-m", service, *flags],
        capture_output=True, text=True, timeout=60, env={**os.environ, **(variables or {})},
    )  # fmt: skip
