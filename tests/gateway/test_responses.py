"""What a good request to `/v1/responses` gets, whole and streamed, also by the official client."""

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System, whole_system
from tests.gateway.responses_client import (
    argued,
    begun,
    ended,
    events_of,
    kinds,
    respond,
    response_of,
    said,
)
from tests.scripted_llm import MODEL, Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
FAILURE = ChiasmError(Reason.NO_ENCODER, "No encoder answers.", "messages[0].parts[0].image")
WORDS = [
    "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
    "content_part.done", "output_item.done",
]  # fmt: skip
CALL = [
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
    "output_item.done",
]  # fmt: skip
TWO_CALLS = Script(
    deltas=[
        said("Let me look."), begun(0), argued(0, '{"city": '), argued(0, '"Oslo"}'),
        begun(1), argued(1, "{}"),
    ],
    end=ended('{"city": "Oslo"}', "{}"),
)  # fmt: skip


def logprob(
    token: bytes, logprob: float, *top: tuple[bytes, float]
) -> llm_service_pb2.TokenLogprob:
    alternatives = [_S.TokenLogprob(token=other, logprob=its) for other, its in top]
    return _S.TokenLogprob(token=token, logprob=logprob, top=alternatives)


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Waits until `condition()` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def test_a_response_has_a_message_usage_and_the_path_of_each_picture(system: System) -> None:
    response = await response_of(system)
    assert response["object"] == "response"
    assert response["id"].startswith("resp_")
    assert response["model"] == MODEL
    assert response["status"] == "completed"
    assert abs(response["created_at"] - time.time()) < 60
    assert response["completed_at"] >= response["created_at"]
    assert response["error"] is response["incomplete_details"] is None
    (message,) = response["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}
        ],
    }
    assert response["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {
            "cached_tokens": 5, "cache_write_tokens": 0, "image_tokens": 18, "text_tokens": 12,
        },
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 37,
    }  # fmt: skip
    assert response["chiasm"]["timings"]["encode_ms"] == 3.0
    assert response["chiasm"]["images"][0]["encoder"] == "eye-1"


async def test_the_stages_are_a_header_as_well(system: System) -> None:
    assert "decode;dur=20.000" in (await respond(system)).headers["server-timing"]
    assert "accept;dur=" in (await respond(system, stream=True)).headers["server-timing"]


async def test_a_picture_is_counted_by_the_item_of_the_input_that_held_it(system: System) -> None:
    end = finished()
    end.image_paths[0].message_index = 2
    system.llm.script = Script(end=end)
    told = await response_of(
        system,
        instructions="Be short.",
        input=[
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"role": "user", "content": "b"},
        ],
    )
    assert told["chiasm"]["images"][0]["message"] == 2


async def test_parameters_are_echoed_and_what_was_left_open_is_null(system: System) -> None:
    told = await response_of(system)
    assert told["temperature"] is told["top_p"] is told["instructions"] is None
    assert told["max_output_tokens"] is told["user"] is None
    assert told["text"]["format"] == {"type": "text"}
    assert (told["tools"], told["tool_choice"], told["parallel_tool_calls"]) == ([], "auto", True)
    assert told["metadata"] == {}
    assert told["truncation"] == "disabled"
    asked: dict[str, Any] = {
        "instructions": "Be short.", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 9,
        "metadata": {"a": "b"}, "user": "u", "parallel_tool_calls": False, "top_logprobs": 3,
        "safety_identifier": "s", "prompt_cache_key": "k",
    }  # fmt: skip
    told = await response_of(system, **asked)
    assert {name: told[name] for name in asked} == asked


async def test_nothing_is_stored_whatever_store_says(system: System) -> None:
    for given in ({}, {"store": None}, {"store": False}, {"store": True}):
        assert (await response_of(system, **given))["store"] is False
    answer = await system.http.get("/v1/responses/resp_1")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_an_answer_that_was_cut_is_incomplete(system: System) -> None:
    system.llm.script = Script(end=finished(_S.FINISH_REASON_LENGTH))
    response = await response_of(system)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert response["output"][-1]["status"] == "incomplete"
    events = await events_of(system)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


async def test_an_answer_without_text_or_calls_is_an_empty_message(system: System) -> None:
    system.llm.script = Script(texts=())
    (message,) = (await response_of(system))["output"]
    assert message["content"][0]["text"] == ""
    assert kinds(await events_of(system))[2:-1] == WORDS


async def test_the_events_of_a_text_come_in_the_documented_order(system: System) -> None:
    events = await events_of(system)
    deltas = ["output_text.delta"] * 3
    assert kinds(events) == [
        "created", "in_progress", *WORDS[:2], *deltas, *WORDS[3:], "completed",
    ]  # fmt: skip
    created, progress, added, part, *texts, done, part_done, item_done, completed = events
    assert created["response"] == progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert added["item"]["content"] == []
    assert part["part"]["text"] == ""
    assert [one["delta"] for one in texts] == ["Hello", ", ", "world"]
    assert done["text"] == part_done["part"]["text"] == "Hello, world"
    assert item_done["item"] == completed["response"]["output"][0]
    ids = {one["item_id"] for one in (part, *texts, done, part_done)}
    assert ids == {added["item"]["id"]} == {item_done["item"]["id"]}
    assert completed["response"]["id"] == created["response"]["id"]
    assert completed["response"]["usage"]["total_tokens"] == 37
    assert "chiasm" in completed["response"]


async def test_a_stream_ends_with_its_last_event_and_without_done(system: System) -> None:
    assert "[DONE]" not in (await respond(system, stream=True)).text


async def test_whole_and_streamed_responses_are_the_same_but_for_ids(system: System) -> None:
    system.llm.script = TWO_CALLS
    whole = await response_of(system)
    streamed = (await events_of(system))[-1]["response"]
    for one in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            del one[name]
        for item in one["output"]:
            del item["id"]
    assert whole == streamed


async def test_calls_come_after_the_text_each_as_an_item_of_its_own(system: System) -> None:
    system.llm.script = TWO_CALLS
    response = await response_of(system)
    assert response["status"] == "completed"
    message, first, second = response["output"]
    assert message["content"][0]["text"] == "Let me look."
    assert first.pop("id").startswith("fc_")
    assert first == {
        "type": "function_call", "status": "completed", "call_id": "call_0", "name": "weather",
        "arguments": '{"city": "Oslo"}',
    }  # fmt: skip
    assert second["call_id"] == "call_1"
    assert second["arguments"] == "{}"


async def test_the_events_of_calls_come_in_the_documented_order(system: System) -> None:
    system.llm.script = TWO_CALLS
    events = await events_of(system)
    first = [CALL[0], CALL[1], *CALL[1:]]
    assert kinds(events) == ["created", "in_progress", *WORDS, *first, *CALL, "completed"]
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == [0] * len(WORDS) + [1] * len(first) + [2] * len(CALL)
    begun_call = events[2 + len(WORDS)]["item"]
    assert (begun_call["status"], begun_call["arguments"]) == ("in_progress", "")
    assert (begun_call["name"], begun_call["call_id"]) == ("weather", "call_0")
    pieces = [one["delta"] for one in events if one["type"].endswith("arguments.delta")]
    assert pieces == ['{"city": ', '"Oslo"}', "{}"]
    done = [one for one in events if one["type"].endswith("arguments.done")]
    assert [one["arguments"] for one in done] == ['{"city": "Oslo"}', "{}"]
    assert {one["name"] for one in done} == {"weather"}


async def test_a_call_without_text_has_no_message(system: System) -> None:
    system.llm.script = Script(deltas=[begun(0) + argued(0, "{}")], end=ended("{}"))
    assert [item["type"] for item in (await response_of(system))["output"]] == ["function_call"]


async def test_all_of_a_call_may_come_at_once(system: System) -> None:
    both = [
        _S.ToolCallDelta(call_index=0, id="call_0", name="weather", arguments_json="{}"),
        _S.ToolCallDelta(call_index=1, id="call_1", name="weather", arguments_json="{}"),
    ]
    system.llm.script = Script(
        deltas=[[_S.Delta(text="Well", tool_calls=both)]], end=ended("{}", "{}")
    )
    output = (await response_of(system))["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]


async def test_calls_that_only_the_end_tells_are_not_lost(system: System) -> None:
    system.llm.script = Script(texts=(), end=ended('{"city": "Oslo"}'))
    events = await events_of(system)
    assert kinds(events) == ["created", "in_progress", *CALL, "completed"]
    assert events[-1]["response"]["output"][0]["arguments"] == '{"city": "Oslo"}'


async def test_a_call_that_was_cut_is_incomplete(system: System) -> None:
    system.llm.script = Script(deltas=[begun(0), argued(0, '{"ci')], end=ended(cut=True))
    response = await response_of(system)
    assert response["status"] == "incomplete"
    (item,) = response["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"ci')


async def test_logprobs_come_if_they_are_included(system: System) -> None:
    told = [logprob(b"He", -0.5, (b"He", -0.5), (b"\xc3", -2.0))]
    held = [logprob(b"llo", -0.25), logprob(b"!", -1.0)]
    deltas = [
        [_S.Delta(text="He", logprobs=told)],
        [_S.Delta(text="", logprobs=held[:1])],
        [_S.Delta(text="llo")],
        [_S.Delta(text="", logprobs=held[1:])],
    ]
    system.llm.script = Script(deltas=deltas)
    assert (await response_of(system, top_logprobs=2))["output"][0]["content"][0]["logprobs"] == []
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = await events_of(system, **asked)
    pieces = [one["logprobs"] for one in events if one["type"].endswith("text.delta")]
    assert [[one["token"] for one in piece] for piece in pieces] == [["He"], ["llo"], ["!"]]
    assert pieces[0] == [
        {
            "token": "He", "logprob": -0.5, "bytes": [72, 101],
            "top_logprobs": [
                {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
                {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -2.0, "bytes": [195]},
            ],
        }
    ]  # fmt: skip
    content = events[-1]["response"]["output"][0]["content"][0]
    assert [one["token"] for one in content["logprobs"]] == ["He", "llo", "!"]
    assert content["text"] == "Hello"


async def test_the_official_client_reads_a_response(system: System) -> None:
    response = await system.openai.responses.create(
        model=MODEL, input="hi", instructions="Be short.", metadata={"a": "b"}
    )
    assert response.output_text == "Hello, world"
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 5
    assert response.usage.total_tokens == 37


async def test_the_official_client_reads_a_stream(system: System) -> None:
    stream = await system.openai.responses.create(model=MODEL, input="hi", stream=True)
    events = [event async for event in stream]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Hello, world"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello, world"


async def test_the_official_clients_own_accumulation_gives_the_same(system: System) -> None:
    system.llm.script = TWO_CALLS
    async with system.openai.responses.stream(model=MODEL, input="hi") as stream:
        kept = [event async for event in stream]
        final = await stream.get_final_response()
    snapshots = [one.snapshot for one in kept if one.type == "response.output_text.delta"]
    assert snapshots == ["Let me look."]
    assert final.output_text == "Let me look."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [one.arguments for one in calls] == ['{"city": "Oslo"}', "{}"]


class City(BaseModel):
    name: str
    people: int


async def test_the_official_client_parses_structured_answers(system: System) -> None:
    system.llm.script = Script(['{"name": "Oslo",', '"people": 700000}'])
    response = await system.openai.responses.parse(model=MODEL, input="hi", text_format=City)
    assert response.output_parsed == City(name="Oslo", people=700_000)
    schema = json.loads(system.llm.last.message.constraint.json_schema)
    assert set(schema["properties"]) == {"name", "people"}
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"
    assert response.text.format.name == "City"
    async with system.openai.responses.stream(model=MODEL, input="hi", text_format=City) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == City(name="Oslo", people=700_000)


async def test_the_official_client_can_send_an_answer_back(system: System) -> None:
    system.llm.script = Script(
        deltas=[said("Let me look."), begun(0), argued(0, "{}")], end=ended("{}")
    )
    first = await system.openai.responses.create(model=MODEL, input="Rain?")
    history: Any = [{"role": "user", "content": "Rain?"}, *first.output]
    history.append({"type": "function_call_output", "call_id": "call_0", "output": "no"})
    system.llm.script = Script(["No."])
    second = await system.openai.responses.create(model=MODEL, input=history)
    assert second.output_text == "No."


async def test_a_failure_of_a_whole_answer_is_an_http_error(system: System) -> None:
    system.llm.script = Script(failure=FAILURE)
    answer = await respond(system, input=[{"role": "user", "content": "a"}])
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"] == {
        "message": "No encoder answers.",
        "type": "server_error",
        "param": "input[0].content",
        "code": "no_encoder",
    }


async def test_a_failure_in_a_stream_is_a_failed_response_and_an_error(system: System) -> None:
    system.llm.script = Script(failure=FAILURE)
    events = await events_of(system)
    *_, failed, error = events
    assert kinds(events)[-2:] == ["failed", "error"]
    response = failed["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "No encoder answers."}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hello, world"
    told = {"code": "no_encoder", "message": "No encoder answers.", "param": "input"}
    assert {name: error[name] for name in told} == told
    assert error["error"] == told | {"type": "server_error"}


async def test_the_official_client_sees_the_failed_response_and_then_raises(
    system: System,
) -> None:
    system.llm.script = Script(failure=FAILURE)
    stream = await system.openai.responses.create(model=MODEL, input="hi", stream=True)
    seen: list[str] = []

    async def read() -> None:
        async for event in stream:
            seen.append(event.type)

    with pytest.raises(openai.APIError, match="No encoder answers"):
        await read()
    assert seen[-1] == "response.failed"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.QUEUE_FULL, "rate_limit_exceeded"),
        (Reason.IMAGE_INVALID, "image_parse_error"),
        (Reason.REQUEST_INVALID, "invalid_prompt"),
        (Reason.DEADLINE, "server_error"),
    ],
)
async def test_a_failed_responses_code_is_one_that_the_client_knows(
    system: System, reason: Reason, code: str
) -> None:
    system.llm.script = Script(failure=ChiasmError(reason, "So it is."))
    failed = (await events_of(system))[-2]
    assert failed["response"]["error"] == {"code": code, "message": "So it is."}


async def test_an_answer_that_never_ends_well_is_an_error(system: System) -> None:
    system.llm.script = Script(end=None)
    answer = await respond(system)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert kinds(await events_of(system))[-2:] == ["failed", "error"]


async def test_calls_out_of_order_are_an_error_and_no_wrong_item(system: System) -> None:
    deltas = [begun(0), begun(1), argued(0, "{}")]
    system.llm.script = Script(deltas=deltas, end=ended("{}", "{}"))
    assert (await respond(system)).status_code == 500
    assert kinds(await events_of(system))[-2:] == ["failed", "error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_token_is_an_http_error(
    system: System, stream: bool
) -> None:
    system.llm.script = Script(
        refusal=ChiasmError(Reason.CONTEXT_LENGTH_EXCEEDED, "33 of 32 tokens.", "messages")
    )
    answer = await respond(system, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_ends_the_work(system: System, stream: bool) -> None:
    system.llm.script = Script(["x"] * 1000, pause_seconds=0.02)
    request = asyncio.create_task(respond(system, stream=stream))
    await until(lambda: system.llm.running == 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: system.llm.running == 0)


async def test_headers_and_the_first_event_come_before_the_first_token(system: System) -> None:
    system.llm.script = Script(["late"], pause_seconds=1.0)
    body = {"model": MODEL, "input": "hi", "stream": True}
    async with system.http.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        pieces = [piece async for piece in answer.aiter_raw()]
    assert pieces[0].startswith(b"event: response.created\n")
    assert b"late" not in pieces[0]


async def test_a_silent_stream_is_kept_alive_by_comments_that_the_client_skips() -> None:
    async with whole_system(keep_alive_seconds=0.1) as system:
        system.llm.script = Script(["late"], pause_seconds=1.0)
        assert ": keep-alive\n\n" in (await respond(system, stream=True)).text
        stream = await system.openai.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"


async def test_http_1_0_gets_a_stream_without_chunks(system: System) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    body = json.dumps({"model": MODEL, "input": "hi", "stream": True}).encode()
    head = b"POST /v1/responses HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, told = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"chunked" not in head
    assert told.startswith(b"event: response.created\ndata: {")
    assert b"event: response.completed\n" in told


async def test_text_of_any_script_arrives_as_it_was_said(system: System) -> None:
    texts = ["\N{EYE}", "\u4e2d", 'quote " and \\ and \n\n data: x', "\N{LINE SEPARATOR}"]
    system.llm.script = Script(texts)
    stream = await system.openai.responses.create(model=MODEL, input="hi", stream=True)
    events = [event async for event in stream]
    got = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert got == texts


async def test_many_streams_at_once_do_not_mix(system: System) -> None:
    answers = await asyncio.gather(*(events_of(system) for _ in range(16)))
    assert len({events[0]["response"]["id"] for events in answers}) == 16
    assert {events[-1]["response"]["output"][0]["content"][0]["text"] for events in answers} == {
        "Hello, world"
    }
