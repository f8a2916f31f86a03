"""What a good request gets, whole and streamed, and what it gets when the LLM service fails."""

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System, whole_system
from tests.scripted_llm import MODEL, Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
FAILURE = ChiasmError(Reason.NO_ENCODER, "No encoder answers.", "messages[0].parts[0].image")


async def events_of(system: System, **fields: object) -> list[str]:
    """The data of all events of a streamed answer."""
    answer = await system.ask(stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


async def chunks_of(system: System, **fields: object) -> list[Any]:
    """The chunks of a streamed answer that ends well."""
    *chunks, done = await events_of(system, **fields)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


async def until(condition: Any, seconds: float = 1.0) -> None:
    """Waits until `condition()` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def test_a_whole_answer_has_text_usage_and_the_path_of_each_picture(system: System) -> None:
    body = (await system.ask()).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert abs(body["created"] - time.time()) < 60
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 7,
        "total_tokens": 37,
        "prompt_tokens_details": {"cached_tokens": 5, "image_tokens": 18, "text_tokens": 12},
    }
    assert body["chiasm"] == {
        "timings": {
            "queue_ms": 1.0,
            "fetch_ms": 5.0,
            "encode_ms": 3.0,
            "transfer_ms": 2.0,
            "prefill_ms": 10.0,
            "decode_ms": 20.0,
            "total_ms": 40.0,
        },
        "images": [
            {
                "message": 0,
                "part": 1,
                "source": "remote",
                "encoder": "eye-1",
                "tokens": 18,
                "identity_checked": True,
                "encoder_cache_hit": True,
            }
        ],
    }


async def test_the_finish_reason_is_the_llm_services(system: System) -> None:
    system.llm.script = Script(end=finished(llm_service_pb2.FINISH_REASON_LENGTH))
    assert (await system.ask()).json()["choices"][0]["finish_reason"] == "length"
    assert (await chunks_of(system))[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_begins_with_the_role_and_ends_with_one_finish(system: System) -> None:
    chunks = await chunks_of(system)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1:] == [{"content": "Hello"}, {"content": ", "}, {"content": "world"}, {}]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, None, "stop"]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_without_include_usage_no_chunk_has_usage_and_the_finish_has_the_trace(
    system: System,
) -> None:
    for options in (None, {}, {"include_usage": False}):
        chunks = await chunks_of(system, stream_options=options)
        assert not any("usage" in chunk for chunk in chunks)
        assert ["chiasm" in chunk for chunk in chunks] == [False] * 4 + [True]
        assert chunks[-1]["chiasm"]["timings"]["encode_ms"] == 3.0


async def test_include_usage_adds_one_chunk_without_choices_that_has_the_trace(
    system: System,
) -> None:
    chunks = await chunks_of(system, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 37
    assert ["chiasm" in chunk for chunk in chunks] == [False] * 5 + [True]


async def test_the_official_client_reads_both_forms(system: System) -> None:
    whole = await system.openai.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == "Hello, world"
    assert whole.usage is not None
    assert whole.usage.total_tokens == 37
    stream = await system.openai.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, world"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 30


async def test_text_of_any_script_arrives_as_it_was_said(system: System) -> None:
    texts = ["\N{EYE}", "\u4e2d", 'quote " and \\ and \n\n data: x', "\N{LINE SEPARATOR}"]
    system.llm.script = Script(texts)
    assert (await system.ask()).json()["choices"][0]["message"]["content"] == "".join(texts)
    chunks = await chunks_of(system)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]] == texts


async def test_headers_of_a_stream_come_before_the_first_token(system: System) -> None:
    system.llm.script = Script(["late"], pause_seconds=0.5)
    began = time.monotonic()
    headers = {"accept-encoding": "gzip"}
    async with system.http.stream(
        "POST", "/v1/chat/completions", json=ASK | {"stream": True}, headers=headers
    ) as answer:
        assert time.monotonic() - began < 0.4
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        pieces = [piece async for piece in answer.aiter_raw()]
    assert b'"role":"assistant"' in pieces[0]
    assert b"late" not in pieces[0]


async def test_each_token_is_sent_when_it_comes(system: System) -> None:
    system.llm.script = Script(["a", "b", "c"], pause_seconds=0.1)
    async with system.http.stream(
        "POST", "/v1/chat/completions", json=ASK | {"stream": True}
    ) as answer:
        times = [time.monotonic() async for _ in answer.aiter_raw()]
    assert times[2] - times[0] > 0.08


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_token_is_an_http_error(
    system: System, stream: bool
) -> None:
    system.llm.script = Script(
        refusal=ChiasmError(Reason.CONTEXT_LENGTH_EXCEEDED, "33 of 32 tokens.", "messages")
    )
    answer = await system.ask(stream=stream)
    assert answer.status_code == 400
    assert answer.json() == {
        "error": {
            "message": "33 of 32 tokens.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


async def test_a_failure_of_a_whole_answer_is_an_http_error(system: System) -> None:
    system.llm.script = Script(failure=FAILURE)
    answer = await system.ask()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_encoder"


async def test_a_failure_in_a_stream_is_an_event_and_no_finish(system: System) -> None:
    system.llm.script = Script(failure=FAILURE)
    *texts, error, done = await events_of(system)
    assert json.loads(error) == {
        "error": {
            "message": "No encoder answers.",
            "type": "server_error",
            "param": "messages[0].content",
            "code": "no_encoder",
        }
    }
    assert done == "[DONE]"
    assert all(json.loads(text)["choices"][0]["finish_reason"] is None for text in texts)
    stream = await system.openai.chat.completions.create(**ASK, stream=True)
    with pytest.raises(openai.APIError, match="No encoder answers"):
        [chunk async for chunk in stream]


async def test_an_answer_that_never_ends_well_is_an_error(system: System) -> None:
    system.llm.script = Script(end=None)
    answer = await system.ask()
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert json.loads((await events_of(system))[-2])["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_ends_the_work(system: System, stream: bool) -> None:
    system.llm.script = Script(["x"] * 1000, pause_seconds=0.02)
    request = asyncio.create_task(system.ask(stream=stream))
    await until(lambda: system.llm.running == 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: system.llm.running == 0)


async def test_a_caller_that_leaves_before_admission_ends_the_work(system: System) -> None:
    system.llm.script = Script(admission_seconds=30)
    request = asyncio.create_task(system.ask(stream=True))
    await until(lambda: system.llm.running == 1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: system.llm.running == 0)


async def test_a_good_stream_is_not_touched_by_bad_requests_beside_it(system: System) -> None:
    system.llm.script = Script(["x"] * 20, pause_seconds=0.01)
    stream = asyncio.create_task(chunks_of(system))
    await until(lambda: system.llm.running == 1)
    bad = await asyncio.gather(
        system.ask(temperature=9), system.send(b"{"), system.send(b"x" * 5_000_000)
    )
    assert [answer.status_code for answer in bad] == [400, 400, 413]
    assert len(await stream) == 22


async def test_many_streams_at_once_do_not_mix(system: System) -> None:
    answers = await asyncio.gather(*(chunks_of(system) for _ in range(32)))
    assert all(len(chunks) == 5 for chunks in answers)
    assert len({chunks[0]["id"] for chunks in answers}) == 32


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_an_answer_without_chunks(system: System, stream: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    body = json.dumps(ASK | {"stream": stream}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, told = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"chunked" not in head
    assert told.startswith(b"data: {") if stream else json.loads(told)
    assert told.endswith(b"data: [DONE]\n\n") == stream


async def test_a_service_that_stops_midway_is_an_error_and_no_end() -> None:
    async with whole_system() as broken:
        broken.llm.script = Script(["x"] * 100, pause_seconds=0.05)
        whole = asyncio.create_task(broken.ask())
        stream = asyncio.create_task(broken.ask(stream=True))
        await until(lambda: broken.llm.running == 2)
        await broken.server.abort()
        assert (await whole).status_code == 503
        *_, error, done = (await stream).text.removesuffix("\n\n").split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "not_ready"
        assert done == "data: [DONE]"


async def test_a_client_with_httpx_limits_reuses_its_connection(system: System) -> None:
    limits = httpx.Limits(max_connections=1)
    url = f"http://127.0.0.1:{system.port}"
    async with httpx.AsyncClient(base_url=url, limits=limits, verify=False) as client:
        for _ in range(3):
            answer = await client.post("/v1/chat/completions", json=ASK)
            assert answer.status_code == 200
            assert answer.headers.get("connection") != "close"


def called(choice: int, index: int, arguments: str, **first: str) -> llm_service_pb2.Delta:
    call = llm_service_pb2.ToolCallDelta(call_index=index, arguments_json=arguments, **first)
    return llm_service_pb2.Delta(choice_index=choice, tool_calls=[call])


def two_calls() -> Script:
    """Text and two calls in the first choice, one call alone in the second."""
    end = finished(
        llm_service_pb2.FINISH_REASON_TOOL_CALLS, llm_service_pb2.FINISH_REASON_TOOL_CALLS
    )
    made = [
        [("call_a", "weather", '{"city": "Oslo"}'), ("call_b", "time", "{}")],
        [("call_c", "time", "{}")],
    ]
    for choice, calls in zip(end.choices, made, strict=True):
        for name, function, arguments in calls:
            choice.tool_calls.add(id=name, name=function, arguments_json=arguments)
    deltas = [
        [llm_service_pb2.Delta(choice_index=0, text="I look.")],
        [called(0, 0, "", id="call_a", name="weather"), called(1, 0, "", id="call_c", name="time")],
        [called(0, 0, '{"city": '), called(1, 0, "{}")],
        [called(0, 0, '"Oslo"}')],
        [called(0, 1, "{", id="call_b", name="time")],
        [called(0, 1, "}")],
    ]
    return Script(deltas=deltas, end=end)


async def test_a_whole_answer_holds_its_calls_and_no_empty_content(system: System) -> None:
    system.llm.script = two_calls()
    first, second = (await system.ask(n=2)).json()["choices"]
    assert first["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "tool_calls": [
            {"id": "call_a", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }  # fmt: skip
    assert second["message"]["content"] is None
    assert [one["finish_reason"] for one in (first, second)] == ["tool_calls", "tool_calls"]


async def test_streamed_calls_have_one_id_and_fragments_that_join(system: System) -> None:
    system.llm.script = two_calls()
    chunks = await chunks_of(system, n=2)
    calls: dict[tuple[int, int], list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", []):
                key = choice["index"], delta["index"]
                if key not in calls:
                    assert delta["type"] == "function"
                    calls[key] = [delta["id"], delta["function"]["name"], ""]
                else:
                    assert delta.keys() == {"index", "function"}
                    assert delta["function"].keys() == {"arguments"}
                calls[key][2] += delta["function"]["arguments"]
    assert calls == {
        (0, 0): ["call_a", "weather", '{"city": "Oslo"}'],
        (0, 1): ["call_b", "time", "{}"],
        (1, 0): ["call_c", "time", "{}"],
    }
    ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert [end for end in ends if end] == ["tool_calls", "tool_calls"]
