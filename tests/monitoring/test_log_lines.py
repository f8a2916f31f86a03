"""The logs of the three processes: JSON, a line a request, one id in all of them, no content."""

import asyncio
import json
import time
from typing import Any

import pytest

from chiasm.conversation import user
from tests.gateway.raw_http import request, wired
from tests.monitoring.page import ROOT, rows_of
from tests.system.processes import SAMPLES, ServiceProcess
from tests.system.three import Three, data_url, figure, noise

pytestmark = pytest.mark.system

CHATS = "/v1/chat/completions"
PAGE = ROOT / "docs" / "logs.md"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SECRET = "my passport is L8988901C"
PICTURE = (SAMPLES / "star.png").read_bytes()
PROBES = ("/health", "/ready", "/metrics")
SECONDS = 20.0


def lines_of(process: ServiceProcess) -> list[dict[str, Any]]:
    """Every line of a log, each a JSON object."""
    read = [json.loads(line) for line in process.log().splitlines()]
    assert all(isinstance(line, dict) for line in read)
    return read


def about(process: ServiceProcess, request_id: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(process) if line.get("request_id") == request_id]


async def ended(*processes: ServiceProcess, request_id: str) -> list[dict[str, Any]]:
    """The line of each process about a request: one each, once the processes have had time."""
    until = time.monotonic() + SECONDS
    while not all(about(process, request_id) for process in processes):
        assert time.monotonic() < until, [about(process, request_id) for process in processes]
        await asyncio.sleep(0.05)
    # Time for lines too many.
    await asyncio.sleep(0.5)
    found = [about(process, request_id) for process in processes]
    assert [len(lines) for lines in found] == [1] * len(processes), found
    return [lines[0] for lines in found]


def fields_of(process: str) -> set[str]:
    """The fields that the page lists for the line of a process."""
    return {
        row[0].strip("`")
        for row in rows_of(PAGE.read_text(), "field")
        if row[1] in {process, "all", "services" if process != "gateway" else ""}
    }


def check(lines: list[dict[str, Any]], trace: str | None = TRACE) -> None:
    """Raises AssertionError where a line has a field that the page does not list."""
    for line in lines:
        assert line.keys() <= fields_of(line["service"]), line.keys() - fields_of(line["service"])
        assert line.get("trace_id") == trace
        assert line["ms"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_question_about_a_picture_is_a_line_in_each_log(
    logged: Three, stream: bool
) -> None:
    body = logged.body([user(noise(71 + stream), SECRET)], stream=stream, max_tokens=4)
    name = f"picture-{stream}"
    headers = {"x-request-id": name, "traceparent": PARENT}
    async with logged.http() as http:
        assert (await http.post(CHATS, json=body, headers=headers)).status_code == 200
    gateway, llm, encoder = lines = await ended(
        logged.gateway, logged.llm, logged.encoder, request_id=name
    )
    check(lines)
    assert (gateway["event"], gateway["route"], gateway["status"]) == ("request", CHATS, 200)
    assert (llm["event"], llm["method"], llm["status"]) == ("call", "Generate", "OK")
    assert (encoder["event"], encoder["method"], encoder["status"]) == ("call", "EncodeImage", "OK")
    assert gateway["prompt_tokens"] == llm["prompt_tokens"]
    assert gateway["completion_tokens"] == llm["completion_tokens"]
    assert llm["images"] == 1
    assert encoder["source"] == "computed"


async def test_a_request_without_a_trace_has_no_trace_id(logged: Three) -> None:
    async with logged.http() as http:
        await http.post(CHATS, json=logged.body([user("Hi")]), headers={"x-request-id": "plain"})
    check(await ended(logged.gateway, logged.llm, request_id="plain"), trace=None)


async def test_a_picture_that_only_the_encoder_can_refuse_is_a_line_in_each_log(
    logged: Three,
) -> None:
    cut = PICTURE[: len(PICTURE) // 2]
    headers = {"x-request-id": "cut", "traceparent": PARENT}
    async with logged.http() as http:
        answer = await http.post(CHATS, json=logged.body([user(cut, SECRET)]), headers=headers)
    assert answer.status_code == 400
    lines = await ended(logged.gateway, logged.llm, logged.encoder, request_id="cut")
    check(lines)
    assert {line["reason"] for line in lines} == {"IMAGE_INVALID"}


async def test_a_caller_that_leaves_is_a_line_in_each_log(logged: Three) -> None:
    fields: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    body = json.dumps(logged.body([user(noise(75), SECRET)], **fields)).encode()
    headers = (f"traceparent: {PARENT}", "x-request-id: left")
    async with wired(logged.gateway.port) as wire:
        await wire.send(request("POST", CHATS, body, headers=headers))
        await wire.head()
        wire.reset()
    gateway, llm, encoder = lines = await ended(
        logged.gateway, logged.llm, logged.encoder, request_id="left"
    )
    check(lines)
    assert gateway["reason"] == llm["reason"] == "CANCELLED"
    assert encoder["status"] == "OK"


WRONG: dict[str, dict[str, Any]] = {
    "field": {"messages": [{"role": SECRET, "content": SECRET}]},
    "type": {"messages": [{"role": "user", "content": {"text": SECRET}}]},
    "part": {"messages": [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}]},
    "no JSON": {},
    "url": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}
        ]
    },
    "base64": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SECRET}"}}
                ],
            }
        ]
    },
    "no picture": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": data_url(SECRET.encode())}}],
            }
        ]
    },
    "long": {"messages": [{"role": "user", "content": f"{SECRET} " * 4000}]},
    "grammar": {
        "messages": [{"role": "user", "content": SECRET}],
        "structured_outputs": {"regex": f"({SECRET}"},
    },
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
async def test_what_is_wrong_is_logged_without_what_was_sent(
    logged: Three, wrong: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.replace(" ", "-")
    content = json.dumps({"model": logged.model} | wrong) if wrong else f'{{"{SECRET}'
    async with logged.http() as http:
        answer = await http.post(
            CHATS, content=content, headers={"x-request-id": name, "traceparent": PARENT}
        )
    assert answer.status_code == 400
    (line,) = await ended(logged.gateway, request_id=name)
    check([line])
    assert line["reason"]
    assert about(logged.encoder, name) == []


async def test_probes_are_no_lines(logged: Three) -> None:
    async with logged.http() as http:
        for path in PROBES:
            await http.get(path)
    # Encoders are asked for their load each second.
    assert figure(logged.encoder, "chiasm_rpc_calls_total") > 1
    for process in logged.processes:
        asked = {(line.get("method"), line.get("route")) for line in lines_of(process)}
        assert not {method for method, _ in asked} & {"GetLoad", "GetModel"}
        assert not {route for _, route in asked} & set(PROBES)


def test_no_line_of_any_log_has_content(logged: Three) -> None:
    """The last of this file, so that all that was asked above has been logged."""
    for process in logged.processes:
        for word in (SECRET, SECRET.split()[-1], "passport", "iVBOR"):
            assert word not in process.log()
        for line in lines_of(process):
            assert {"event", "level", "service", "timestamp"} <= line.keys()
