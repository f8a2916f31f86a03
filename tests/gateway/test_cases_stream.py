"""Streams as they are on the wire, and callers that leave, streamed or not."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
import pytest_asyncio

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System, whole_system
from tests.gateway.raw_http import Answer, Wire, chat, wired
from tests.scripted_llm import MODEL, Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM: Any = ASK | {"stream": True}
FAILURE = ChiasmError(Reason.NO_ENCODER, "No encoder answers.")
STOP, LENGTH = _S.FINISH_REASON_STOP, _S.FINISH_REASON_LENGTH
ENDLESS = Script(["x"] * 100_000, pause_seconds=0.02)


def said(choice: int, text: str) -> llm_service_pb2.Delta:
    return _S.Delta(choice_index=choice, text=text, token_ids=[1])


SCRIPTS: dict[str, tuple[Script, dict[str, Any]]] = {
    "short": (Script(), {}),
    "long": (Script([f"w{number} " for number in range(2000)]), {}),
    "nothing said": (Script(texts=()), {}),
    "cut": (Script(end=finished(LENGTH)), {}),
    "two choices": (
        Script(deltas=[[said(0, "a"), said(1, "b")], [said(1, "c")]], end=finished(STOP, LENGTH)),
        {"n": 2},
    ),
    "usage": (Script(), {"stream_options": {"include_usage": True}}),
    "two choices with usage": (
        Script(deltas=[[said(0, "a"), said(1, "b")]], end=finished(STOP, STOP)),
        {"n": 2, "stream_options": {"include_usage": True}},
    ),
}
FAILURES: dict[str, Script] = {
    "after nothing": Script(texts=(), failure=FAILURE),
    "after three": Script(failure=FAILURE),
    "no end": Script(end=None),
    "a choice without an end": Script(end=finished(_S.FINISH_REASON_UNSPECIFIED)),
}


async def streamed(system: System, **fields: Any) -> Answer:
    """A streamed answer; after it the connection serves the next request."""
    async with wired(system.port) as wire:
        await wire.send(chat(STREAM | fields))
        answer = await wire.answer()
        assert answer.status == 200
        system.llm.script = Script()
        await wire.send(chat(ASK))
        assert (await wire.answer()).status == 200
        return answer


@pytest.mark.parametrize(("script", "fields"), SCRIPTS.values(), ids=SCRIPTS.keys())
async def test_each_choice_has_one_role_first_and_one_end_and_the_stream_one_done(
    system: System, script: Script, fields: dict[str, Any]
) -> None:
    system.llm.script = script
    *events, done = (await streamed(system, **fields)).events()
    assert done == "[DONE]"
    assert "[DONE]" not in events
    choices = [one for event in events for one in json.loads(event)["choices"]]
    for index in range(fields.get("n", 1)):
        own = [one for one in choices if one["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert not any("role" in one["delta"] for one in own[1:])
        reasons = [one["finish_reason"] for one in own]
        assert [reason is not None for reason in reasons] == [False] * (len(own) - 1) + [True]


@pytest.mark.parametrize("fields", [{}, {"n": 2}])
@pytest.mark.parametrize("wanted", [True, False, None])
async def test_usage_is_told_once_and_last_or_not_at_all(
    system: System, wanted: bool | None, fields: dict[str, Any]
) -> None:
    system.llm.script = Script(end=finished(*[STOP] * fields.get("n", 1)))
    options = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
    *events, _ = (await streamed(system, **fields, **options)).events()
    *others, last = [json.loads(event) for event in events]
    if not wanted:
        assert not any("usage" in chunk for chunk in (*others, last))
        return
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 37)
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    assert all(len(chunk["choices"]) == 1 for chunk in others)


@pytest.mark.parametrize("script", FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.parametrize("usage", [False, True])
async def test_a_failure_in_a_stream_is_told_once_looks_like_no_end_and_closes_the_stream(
    system: System, script: Script, usage: bool
) -> None:
    system.llm.script = script
    answer = await streamed(system, stream_options={"include_usage": usage})
    *chunks, told, done = answer.events()
    assert done == "[DONE]"
    error = json.loads(told)
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["type"] == "server_error"
    for chunk in map(json.loads, chunks):
        assert chunk.get("usage") is None
        assert [one["finish_reason"] for one in chunk["choices"]] == [None]


@pytest.mark.parametrize("script", FAILURES.values(), ids=FAILURES.keys())
async def test_openais_client_raises_at_a_failure_in_a_stream(
    system: System, script: Script
) -> None:
    system.llm.script = script
    stream = await system.openai.chat.completions.create(**STREAM)
    with pytest.raises(openai.APIError):
        [chunk async for chunk in stream]


@pytest.mark.parametrize("fields", [{"n": 0}, {"max_tokens": 0}, {"messages": []}])
async def test_a_stream_that_cannot_be_is_refused_before_it_begins(
    system: System, fields: dict[str, Any]
) -> None:
    async with wired(system.port) as wire:
        await wire.send(chat(STREAM | fields))
        answer = await wire.answer()
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert system.llm.received == []


async def test_headers_and_roles_come_before_the_first_token_and_no_coding_is_applied(
    system: System,
) -> None:
    system.llm.script = Script(pause_seconds=1)
    began = time.monotonic()
    async with wired(system.port) as wire:
        await wire.send(chat(STREAM, headers=("accept-encoding: gzip, br, zstd",)))
        status, headers = await wire.head()
        first = await wire.chunk()
        assert time.monotonic() - began < 0.9
    assert status == 200
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert not {"content-encoding", "content-length"} & set(headers)
    assert b'"role":"assistant"' in first


async def test_each_token_is_in_a_chunk_of_its_own_and_chunks_are_whole_events(
    system: System,
) -> None:
    system.llm.script = Script(["a", "b", "c"], pause_seconds=0.05)
    chunks = (await streamed(system)).chunks
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
    for text in ("a", "b", "c"):
        [found] = [chunk for chunk in chunks if f'"content":"{text}"'.encode() in chunk]
        assert found.count(b"data: ") == 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def impatient() -> AsyncIterator[System]:
    """A gateway that sends a comment after a quarter of a second without news."""
    async with whole_system(keep_alive_seconds=0.25) as running:
        yield running


async def test_a_silent_stream_is_kept_alive_by_comments(impatient: System) -> None:
    impatient.llm.script = Script(["late", "r"], pause_seconds=1.5)
    answer = await streamed(impatient)
    comments = [piece for piece in answer.chunks if piece.startswith(b":")]
    assert set(comments) == {b": keep-alive\n\n"}
    # Within 3 s of silence, at least one in twice the time after which they are due.
    assert 3 <= len(comments) <= 12
    texts = [json.loads(event)["choices"][0]["delta"] for event in answer.events()[:-1]]
    assert "".join(text.get("content", "") for text in texts) == "later"
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_openais_client_reads_over_the_comments(impatient: System) -> None:
    impatient.llm.script = Script(["late", "r"], pause_seconds=0.8)
    stream = await impatient.openai.chat.completions.create(**STREAM)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "later"


async def test_a_stream_with_news_has_no_comment(impatient: System) -> None:
    impatient.llm.script = Script(["x"] * 40, pause_seconds=0.02)
    assert b": keep-alive" not in (await streamed(impatient)).body


async def test_whole_answers_have_no_comment(impatient: System) -> None:
    impatient.llm.script = Script(pause_seconds=0.4)
    assert (await impatient.ask()).json()["choices"][0]["message"]["content"] == "Hello, world"


async def test_a_server_sent_line_break_never_splits_an_event(system: System) -> None:
    texts = ["a\n\ndata: [DONE]\n\n", "\r\n", "\u2028\u2029\u0085", ": keep-alive"]
    system.llm.script = Script(texts)
    *events, _ = (await streamed(system)).events()
    told = [json.loads(event)["choices"][0]["delta"].get("content") for event in events]
    assert told == ["", *texts, None]
    assert not any({"\n", "\r"} & set(event) for event in events)


async def settled(system: System, running: int, seconds: float = 1.0) -> None:
    """Waits until so many requests run at the LLM service; fails after `seconds`."""
    await until(lambda: system.llm.running == running, seconds)


async def until(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.005)


def leave_close(wire: Wire) -> None:
    wire.close()


def leave_reset(wire: Wire) -> None:
    wire.reset()


LEAVING = [leave_close, leave_reset]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("fields", [{"stream": True}, {}], ids=["stream", "whole"])
async def test_a_caller_that_leaves_midway_frees_the_llm_service(
    system: System, fields: dict[str, Any], leave: Callable[[Wire], None]
) -> None:
    system.llm.script = ENDLESS
    async with wired(system.port) as wire:
        await wire.send(chat(ASK | fields))
        await settled(system, 1)
        if fields:
            await wire.head()
            for _ in range(3):
                await wire.chunk()
        leave(wire)
        await settled(system, 0)
    await no_request_in_hand(system)


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("fields", [{"stream": True}, {}], ids=["stream", "whole"])
async def test_a_caller_that_leaves_before_the_llm_service_accepts_frees_it(
    system: System, fields: dict[str, Any], leave: Callable[[Wire], None]
) -> None:
    system.llm.script = Script(admission_seconds=30)
    async with wired(system.port) as wire:
        await wire.send(chat(ASK | fields))
        await settled(system, 1)
        leave(wire)
        await settled(system, 0)
    await no_request_in_hand(system)


async def test_a_caller_that_leaves_while_it_sends_its_body_leaves_nothing(system: System) -> None:
    sent = chat(ASK | {"pad": "x" * 1_000_000})
    async with wired(system.port) as wire:
        await wire.send(sent[:500_000])
        await asyncio.sleep(0.1)
        wire.reset()
    await no_request_in_hand(system)
    assert await metric(system, "chiasm_gateway_held_body_bytes") == 0
    assert system.llm.received == []


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("fields", [{"stream": True}, {}], ids=["stream", "whole"])
@pytest.mark.parametrize("at_once", [True, False], ids=["in one packet", "later"])
async def test_a_caller_that_leaves_with_a_second_request_sent_frees_the_first(
    system: System, fields: dict[str, Any], leave: Callable[[Wire], None], at_once: bool
) -> None:
    system.llm.script = ENDLESS
    async with wired(system.port) as wire:
        await wire.send(chat(ASK | fields) + (chat(ASK) if at_once else b""))
        await settled(system, 1)
        if not at_once:
            await wire.send(chat(ASK))
            await asyncio.sleep(0.1)
        leave(wire)
        await settled(system, 0)
    await no_request_in_hand(system)


async def test_a_reader_that_stalls_is_cut_off_when_it_leaves(system: System) -> None:
    system.llm.script = Script(["x" * 5000] * 100_000)
    async with wired(system.port) as wire:
        await wire.send(chat(STREAM))
        await settled(system, 1)
        await asyncio.sleep(0.5)
        wire.reset()
        await settled(system, 0)


async def no_request_in_hand(system: System) -> None:
    end = time.monotonic() + 1
    # The one that asks is in hand itself.
    while await metric(system, "chiasm_gateway_active_requests") != 1:
        assert time.monotonic() < end, "a request is still in hand"


async def metric(system: System, name: str) -> float:
    lines = (await system.http.get("/metrics")).text.splitlines()
    [found] = [line for line in lines if line.startswith(f"{name} ")]
    return float(found.rpartition(" ")[2])
