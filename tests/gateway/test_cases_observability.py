"""What an operator sees of the gateway: ids, traces, stage timings, metrics."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from chiasm.errors import ChiasmError, Reason
from tests.exposition import Family, Shape, check_names, check_shapes, ours
from tests.gateway.gateway_system import System, gateway_before, whole_system
from tests.gateway.raw_http import chat, request, wired
from tests.gateway.test_gateway_process import gateway_process
from tests.scripted_llm import MODEL, Script, ScriptedLlm

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small() -> AsyncIterator[System]:
    """A gateway that takes one request at a time, of at most a second."""
    async with whole_system(max_active_requests=1, request_timeout_seconds=1) as running:
        yield running


FAILING: dict[str, tuple[dict[str, Any], Script, int]] = {
    "good": ({}, Script(), 200),
    "stream": ({"stream": True}, Script(), 200),
    "bad field": ({"n": 0}, Script(), 400),
    "other model": ({"model": "nope"}, Script(), 404),
    "no room": ({}, Script(refusal=ChiasmError(Reason.QUEUE_FULL, "Full.")), 429),
    "no encoder": ({}, Script(refusal=ChiasmError(Reason.NO_ENCODER, "None.")), 503),
    "fault": ({}, Script(end=None), 500),
    "late": ({}, Script(admission_seconds=5), 504),
}


@pytest.mark.parametrize(("fields", "script", "status"), FAILING.values(), ids=FAILING.keys())
@pytest.mark.parametrize("own", [None, "mine-1"])
async def test_every_answer_has_an_id_that_is_the_callers_where_it_sent_one(
    small: System, fields: dict[str, Any], script: Script, status: int, own: str | None
) -> None:
    small.llm.script = script
    headers = {} if own is None else {"x-request-id": own}
    answer = await small.http.post("/v1/chat/completions", json=ASK | fields, headers=headers)
    assert answer.status_code == status
    told = answer.headers["x-request-id"]
    assert told == own if own else re.fullmatch("req-[0-9a-f]{32}", told)
    if small.llm.received:
        assert small.llm.last.request_id == told
    small.llm.received.clear()


async def test_the_gateways_log_has_the_id_of_each_answer_and_of_the_call_behind_it() -> None:
    llm = ScriptedLlm()
    async with (
        llm.serving() as server,
        gateway_process("--llm", f"127.0.0.1:{server.port}", "--drain-seconds", "0") as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running[1]}", verify=False) as http,
    ):
        answers = [
            await http.post("/v1/chat/completions", json=ASK),
            await http.post("/v1/chat/completions", json=ASK | {"stream": True}),
            await http.post("/v1/chat/completions", content=b"{"),
            await http.get("/nothing"),
        ]
        traced = await http.post("/v1/chat/completions", json=ASK, headers={"traceparent": PARENT})
        running[0].send_signal(signal.SIGTERM)
        _, logged = await asyncio.wait_for(running[0].communicate(), 10)
    lines = {line["request_id"]: line for line in map(json.loads, logged.splitlines())
             if line.get("event") == "request"}  # fmt: skip
    told = [answer.headers["x-request-id"] for answer in answers]
    assert [lines[one]["status"] for one in told] == [200, 200, 400, 404]
    assert [one.request_id for one in llm.received[:2]] == told[:2]
    assert [lines[one].get("trace_id") for one in told] == [None] * 4
    assert lines[traced.headers["x-request-id"]]["trace_id"] == TRACE


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "parent", [PARENT, PARENT[:-2] + "00", "cc" + PARENT[2:], f"cc{PARENT[2:]}-what-may-come"]
)
async def test_a_trace_goes_on_to_the_llm_service_as_it_came(
    system: System, parent: str, stream: bool
) -> None:
    headers = {"traceparent": parent}
    body = ASK | {"stream": stream}
    answer = await system.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert system.llm.last.trace_parent == parent


NO_TRACE = {
    "absent": (),
    "empty": ("traceparent: ",),
    "short": (f"traceparent: {PARENT[:-1]}",),
    "long": (f"traceparent: {PARENT}-more",),
    "upper case": (f"traceparent: {PARENT.upper()}",),
    "version ff": (f"traceparent: ff{PARENT[2:]}",),
    "trace of zeros": (f"traceparent: 00-{'0' * 32}-00f067aa0ba902b7-01",),
    "parent of zeros": (f"traceparent: 00-{TRACE}-{'0' * 16}-01",),
    "no hex": (f"traceparent: 00-{'g' * 32}-00f067aa0ba902b7-01",),
    "two": (f"traceparent: {PARENT}", f"traceparent: {PARENT}"),
    "not ASCII": ("traceparent: \u00fc" + PARENT,),
    "endless": (f"traceparent: cc{PARENT[2:]}-{'x' * 5000}",),
    "its own line": (f"traceparent: {PARENT}\t,{PARENT}",),
}


@pytest.mark.parametrize("lines", NO_TRACE.values(), ids=NO_TRACE.keys())
async def test_a_bad_trace_is_ignored(system: System, lines: tuple[str, ...]) -> None:
    async with wired(system.port) as wire:
        await wire.send(chat(ASK, headers=lines))
        assert (await wire.answer()).status == 200
    assert system.llm.last.trace_parent == ""


async def test_traces_of_requests_at_once_are_not_mixed_up(system: System) -> None:
    system.llm.script = Script(admission_seconds=0.1)
    parents = [f"00-{number:032x}-00f067aa0ba902b7-01" for number in range(1, 17)]

    async def ask(number: int, parent: str) -> None:
        headers = {"traceparent": parent, "x-request-id": f"id-{number}"}
        await system.http.post("/v1/chat/completions", json=ASK, headers=headers)

    await asyncio.gather(*(ask(number, parent) for number, parent in enumerate(parents)))
    found = {one.request_id: one.trace_parent for one in system.llm.received}
    assert found == {f"id-{number}": parent for number, parent in enumerate(parents)}


def timings_of(header: str) -> dict[str, float]:
    """https://www.w3.org/TR/server-timing/: names with a duration in milliseconds."""
    entries = [re.fullmatch(r"([a-z]+);dur=([0-9.]+)", one) for one in header.split(", ")]
    return {entry[1]: float(entry[2]) for entry in entries if entry}


async def test_a_whole_answer_tells_its_stages_in_its_head(system: System) -> None:
    answer = await system.ask()
    told = timings_of(answer.headers["server-timing"])
    body = answer.json()["chiasm"]["timings"]
    assert {f"{name}_ms": value for name, value in told.items()} == body
    assert told["decode"] == 20.0


async def test_a_stream_tells_in_its_head_how_long_it_waited(system: System) -> None:
    system.llm.script = Script(admission_seconds=0.3, pause_seconds=0.2)
    answer = await system.ask(stream=True)
    told = timings_of(answer.headers["server-timing"])
    assert set(told) == {"accept"}
    assert 300 <= told["accept"] < 10_000


async def test_an_error_tells_no_stages(system: System) -> None:
    assert "server-timing" not in (await system.ask(n=0)).headers


NONE: tuple[str, ...] = ()
METRICS: dict[str, Shape] = {
    "chiasm_model_info": ("gauge", ("model",)),
    "chiasm_gateway_requests_total": ("counter", ("reason", "route", "status")),
    "chiasm_gateway_request_seconds": ("histogram", ("route",)),
    "chiasm_gateway_first_token_seconds": ("histogram", NONE),
    "chiasm_gateway_body_bytes": ("histogram", NONE),
    "chiasm_gateway_picture_downloads_total": ("counter", ("outcome",)),
    "chiasm_gateway_active_picture_downloads": ("gauge", NONE),
    "chiasm_gateway_active_requests": ("gauge", NONE),
    "chiasm_gateway_held_body_bytes": ("gauge", NONE),
}


async def scraped(system: System) -> dict[str, Family]:
    answer = await system.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return ours(answer.text)


async def test_names_and_labels_of_the_metrics_are_fixed_and_keep_to_the_rules(
    system: System,
) -> None:
    await system.ask()
    found = await scraped(system)
    check_shapes(found, METRICS)
    check_names(found)


async def test_the_model_is_told_before_anybody_asks_and_follows_the_llm_service() -> None:
    async with whole_system() as fresh:
        assert (await scraped(fresh))["chiasm_model_info"].labels["model"] == {MODEL}
        fresh.llm.card.model_id = "another"
        await asyncio.sleep(1)
        assert (await fresh.ask(model="another")).status_code == 200
        assert (await scraped(fresh))["chiasm_model_info"].labels["model"] == {"another"}


async def test_what_is_asked_for_adds_no_labels(system: System) -> None:
    await system.ask()
    await system.ask(n=0)
    await system.ask(model="nope")
    before = await scraped(system)
    for number in range(50):
        await system.http.get(f"/v1/models/m{number}")
        await system.http.get(f"/made/up/{number}")
        await system.ask(model=f"made-up-{number}")
        async with wired(system.port) as wire:
            await wire.send(request("PROPFIND", f"/odd/{number}"))
            await wire.answer()
    requests = (await scraped(system))["chiasm_gateway_requests_total"].labels
    known = before["chiasm_gateway_requests_total"].labels
    assert requests["route"] - known["route"] <= {"/v1/models/{id}", "other", "/metrics"}
    assert requests["status"] <= {"200", "400", "404", "405"}
    assert "made" not in str(requests)


async def test_a_scrape_does_not_wait_for_a_service_that_is_not_there(
    unused_tcp_port: int,
) -> None:
    async with (
        gateway_before(unused_tcp_port) as port,
        httpx.AsyncClient(verify=False, timeout=2) as http,
    ):
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    assert "chiasm_model_info{" not in text
    assert "chiasm_gateway_active_requests 1.0" in text
