"""Requests to `/v1/responses` that are refused, each with its path and code."""

import asyncio
import json
from typing import Any

import pytest

from chiasm.errors import ChiasmError, Reason
from tests.gateway.gateway_system import System
from tests.gateway.responses_client import WEATHER, call, error_of, output, respond, user, words
from tests.scripted_llm import MODEL, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,QQ=="}


def image(**fields: Any) -> list[Any]:
    return [user(words("a"), IMAGE | fields)]


STATEFUL: dict[str, tuple[dict[str, Any], str]] = {
    "previous response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "conversation id": ({"conversation": "conv_1"}, "conversation"),
    "conversation": ({"conversation": {"id": "conv_1"}}, "conversation"),
    "background": ({"background": True}, "background"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "compaction": ({"context_management": [{"type": "compaction"}]}, "context_management"),
    "moderation": ({"moderation": {"model": "m"}}, "moderation"),
    "messages": ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    "max_tokens": ({"max_tokens": 5}, "max_tokens"),
    "max_completion_tokens": ({"max_completion_tokens": 5}, "max_completion_tokens"),
    "response_format": ({"response_format": {"type": "text"}}, "response_format"),
    "n": ({"n": 2}, "n"),
    "reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    "bare reference": ({"input": [user(words("a")), {"id": "msg_1"}]}, "input[1]"),
    "file": ({"input": [user({"type": "input_file", "file_id": "f"})]}, "input[0].content[0].type"),
    "audio": ({"input": [user({"type": "input_audio"})]}, "input[0].content[0].type"),
    "file id": ({"input": image(file_id="file-1")}, "input[0].content[1].file_id"),
    "file as output": (
        {"input": [call(), output(told=[{"type": "input_file"}])]}, "input[1].output[0].type",
    ),
    "web search": ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
    "file search": ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    "custom tool": ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    "hosted choice": ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    "allowed tools": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
}  # fmt: skip


HARMLESS = {
    "background": False, "truncation": "disabled", "context_management": [], "n": 1, "tools": [],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), HARMLESS.items(), ids=HARMLESS.keys())
async def test_values_that_change_nothing_are_taken(
    system: System, name: str, value: object
) -> None:
    assert (await respond(system, **{name: value})).status_code == 200


@pytest.mark.parametrize(("fields", "param"), STATEFUL.values(), ids=STATEFUL.keys())
async def test_what_needs_state_or_is_not_served_is_refused_by_name(
    system: System, fields: dict[str, Any], param: str
) -> None:
    error = await error_of(system, **fields)
    assert error["param"] == param
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_parameter")


MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({"input": None}, "input", MISSING),
    "input number": ({"input": 5}, "input", TYPE),
    "input empty": ({"input": []}, "input", "empty_array"),
    "only thoughts": ({"input": [{"type": "reasoning"}]}, "input", "empty_array"),
    "item number": ({"input": [5]}, "input[0].type", VALUE),
    "item unknown": ({"input": [{"type": "web_search_call"}]}, "input[0].type", VALUE),
    "item without type": ({"input": [{"content": "a"}]}, "input[0].type", VALUE),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content", MISSING),
    "content empty": ({"input": [user()]}, "input[0].content", "empty_array"),
    "content number": ({"input": [{"role": "user", "content": 5}]}, "input[0].content", TYPE),
    "role": ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", VALUE),
    "part unknown": ({"input": [user({"type": "text"})]}, "input[0].content[0].type", VALUE),
    "part text": (
        {"input": [user({"type": "input_text"})]}, "input[0].content[0].text", MISSING,
    ),
    "no image": ({"input": image(image_url=None)}, "input[0].content[1].image_url", MISSING),
    "image object": (
        {"input": image(image_url={"url": "x"})}, "input[0].content[1].image_url", TYPE,
    ),
    "detail": ({"input": image(detail="fine")}, "input[0].content[1].detail", VALUE),
    "embeds": (
        {"input": [user({"type": "image_embeds", "image_embeds": 5})]},
        "input[0].content[0].image_embeds", TYPE,
    ),
    "no call id": (
        {"input": [call() | {"call_id": None}]}, "input[0].call_id", MISSING,
    ),
    "no arguments": ({"input": [call() | {"arguments": None}]}, "input[0].arguments", MISSING),
    "no output": ({"input": [call(), output(told=None)]}, "input[1].output", MISSING),
    "output empty": ({"input": [call(), output(told=[])]}, "input[1].output", "empty_array"),
    "instructions": ({"instructions": ["a"]}, "instructions", TYPE),
    "model": ({"model": None}, "model", MISSING),
    "temperature": ({"temperature": 3}, "temperature", "above_max_value"),
    "top_p": ({"top_p": "1"}, "top_p", TYPE),
    "max tokens": ({"max_output_tokens": 0}, "max_output_tokens", "below_min_value"),
    "top_logprobs": ({"top_logprobs": 21}, "top_logprobs", "above_max_value"),
    "include": ({"include": ["everything"]}, "include", VALUE),
    "include text": ({"include": "a"}, "include", TYPE),
    "stream": ({"stream": 1}, "stream", TYPE),
    "store": ({"store": "no"}, "store", TYPE),
    "truncation": ({"truncation": "some"}, "truncation", VALUE),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type", VALUE),
    "format text": ({"text": {"format": "json"}}, "text.format", TYPE),
    "no schema": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", MISSING,
    ),
    "no schema name": (
        {"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", MISSING,
    ),
    "verbosity": ({"text": {"verbosity": "great"}}, "text.verbosity", VALUE),
    "metadata text": ({"metadata": "a"}, "metadata", TYPE),
    "metadata number": ({"metadata": {"a": 1}}, "metadata", TYPE),
    "metadata count": (
        {"metadata": {str(n): "" for n in range(17)}}, "metadata", "array_above_max_length",
    ),
    "metadata key": ({"metadata": {"a" * 65: ""}}, "metadata", "string_above_max_length"),
    "metadata value": ({"metadata": {"a": "b" * 513}}, "metadata", "string_above_max_length"),
    "user": ({"user": 5}, "user", TYPE),
    "tool without type": ({"tools": [{"name": "x"}]}, "tools[0].type", MISSING),
    "choice": ({"tool_choice": "some"}, "tool_choice", VALUE),
    "choice without name": ({"tool_choice": {"type": "function"}}, "tool_choice.name", MISSING),
    "seed": ({"seed": "x"}, "seed", TYPE),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), WRONG.values(), ids=WRONG.keys())
async def test_what_is_wrong_is_a_400_with_its_path(
    system: System, fields: dict[str, Any], param: str, code: str
) -> None:
    error = await error_of(system, **fields)
    assert (error["param"], error["code"]) == (param, code)
    assert "messages[" not in error["message"]


async def test_metadata_may_be_as_large_as_it_may(system: System) -> None:
    metadata = {f"{number:064}": "v" * 512 for number in range(16)}
    assert (await respond(system, metadata=metadata)).json()["metadata"] == metadata


async def test_another_model_is_a_404(system: System) -> None:
    answer = await respond(system, model="other")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_picture_that_is_none_is_a_400_with_its_path(system: System) -> None:
    error = await error_of(system, input=image(image_url="data:image/png;base64,!!"))
    assert error["param"] == "input[0].content[1].image_url"


async def test_too_many_pictures_are_refused(system: System) -> None:
    error = await error_of(system, input=[user(*[IMAGE] * 9)])
    assert (error["param"], error["code"]) == ("input", "too_many_images")


HALF = '"\\ud800"'
IN_ECHO = {
    "metadata value": ("metadata", '{"a": %s}'),
    "metadata key": ("metadata", '{%s: "a"}'),
    "tool": (
        "tools",
        '[{"type": "function", "name": "a", "parameters": {"description": %s}}]',
    ),
    "schema": ("text", '{"format": {"type": "json_schema", "name": "a", "schema": {"title": %s}}}'),
}


@pytest.mark.parametrize(("param", "value"), IN_ECHO.values(), ids=IN_ECHO.keys())
async def test_half_a_character_in_what_is_echoed_is_a_400(
    system: System, param: str, value: str
) -> None:
    body = f'{{"model": "{MODEL}", "input": "hi", "{param}": {value % HALF}}}'
    answer = await system.http.post("/v1/responses", content=body.encode())
    assert answer.status_code == 400
    told = answer.json()["error"]["param"]
    assert told == ("tools[0].parameters" if param == "tools" else param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 10_000, b"\xff"])
async def test_a_body_that_is_no_json_object_is_a_400(system: System, body: bytes) -> None:
    answer = await system.http.post("/v1/responses", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in {"invalid_json", "invalid_type"}


async def test_a_body_beyond_the_limit_is_a_413(system: System) -> None:
    answer = await system.http.post("/v1/responses", content=b"x" * 5_000_000)
    assert answer.status_code == 413


async def test_another_method_is_a_405_in_the_error_shape(system: System) -> None:
    answer = await system.http.get("/v1/responses")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_errors_over_a_raw_socket_are_json_and_the_connection_lives_on(
    system: System,
) -> None:
    system.llm.script = Script(refusal=ChiasmError(Reason.QUEUE_FULL, "Full.", retry_after=2.0))
    reader, writer = await asyncio.open_connection("127.0.0.1", system.port)
    for asked, status in (({"store": "x"}, 400), ({}, 429), ({"prompt": {"id": "p"}}, 400)):
        body = json.dumps({"model": MODEL, "input": "hi", "stream": True} | asked).encode()
        writer.write(b"POST /v1/responses HTTP/1.1\r\nhost: a\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).lower()
        assert b" %d " % status in head.split(b"\r\n")[0]
        assert b"content-type: application/json" in head
        assert b"x-request-id: " in head
        assert (b"retry-after: 2" in head) == (status == 429)
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert "error" in json.loads(await asyncio.wait_for(reader.readexactly(length), 5))
    writer.close()


async def test_messages_of_errors_keep_their_words_and_name_the_requests_paths(
    system: System,
) -> None:
    told = "The messages have 9 tokens."
    system.llm.script = Script(
        refusal=ChiasmError(Reason.CONTEXT_LENGTH_EXCEEDED, told, "messages")
    )
    error = (await respond(system)).json()["error"]
    assert (error["message"], error["param"]) == (told, "input")
    system.llm.received.clear()
    error = await error_of(system, tools=[{"type": "function"}])
    assert error["message"] == "The required field tools[0].name is missing."
