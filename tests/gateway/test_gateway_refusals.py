"""Requests that are refused: each with its path and code, and the gateway lives on."""

import json
from typing import Any

import pytest

from chiasm.errors import ChiasmError, Reason
from gateway.openai.errors import CODES, as_http
from tests.gateway.gateway_system import System
from tests.scripted_llm import MODEL, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": HI} | fields).encode()


def part(value: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, value]}]


NO_JSON = {
    "not JSON": b'{"a":x}',
    "empty": b"",
    "UTF-16": body().decode().encode("utf-16"),
    "truncated": body()[:-2],
    "latin-1": b'{"model": "\xe9"}',
    "deep lists": b"[" * 10_000,
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "NaN": body(temperature=float("nan")),
    "infinite": body(invented=float("inf")),
    "two values": body() + body(),
    "many elements": b'{"a": [' + b"0," * 1_000_001 + b"0]}",
}


@pytest.mark.parametrize("sent", NO_JSON.values(), ids=NO_JSON.keys())
async def test_a_body_that_is_no_json_is_a_400(system: System, sent: bytes) -> None:
    answer = await system.send(sent)
    assert answer.status_code == 400
    assert answer.json()["error"] | {"message": ""} == {
        "message": "", "type": "invalid_request_error", "param": None, "code": "invalid_json",
    }  # fmt: skip


@pytest.mark.parametrize("sent", [b"[]", b"5", b"null", b'"x"', b"true"])
async def test_json_of_another_kind_is_a_400(system: System, sent: bytes) -> None:
    answer = await system.send(sent)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_type"


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no message": ({"messages": []}, "messages", "empty_array"),
    "messages null": ({"messages": None}, "messages", "missing_required_parameter"),
    "messages object": ({"messages": {}}, "messages", "invalid_type"),
    "message text": ({"messages": ["x"]}, "messages[0]", "invalid_type"),
    "model null": ({"model": None}, "model", "missing_required_parameter"),
    "model number": ({"model": 5}, "model", "invalid_type"),
    "role": ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "invalid_value"),
    "no content": ({"messages": [*HI, {"role": "user"}]}, "messages[1].content",
                   "missing_required_parameter"),
    "no parts": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content",
                 "empty_array"),
    "content number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content",
                       "invalid_type"),
    "part text": ({"messages": part("x")}, "messages[0].content[1].type", "invalid_value"),
    "part image": ({"messages": part({"type": "image"})}, "messages[0].content[1].type",
                   "invalid_value"),
    "part input_image": ({"messages": part({"type": "input_image", "image_url": "x"})},
                         "messages[0].content[1].type", "invalid_value"),
    "no url": ({"messages": part({"type": "image_url", "image_url": {}})},
               "messages[0].content[1].image_url.url", "missing_required_parameter"),
    "detail": ({"messages": part({"type": "image_url",
                                  "image_url": {"url": "", "detail": "medium"}})},
               "messages[0].content[1].image_url.detail", "invalid_value"),
    "NUL": ({"messages": part({"type": "text", "text": "a\0b"})}, "messages[0].content[1].text",
            "invalid_value"),
    "surrogate": ({"messages": part({"type": "text", "text": "a\ud83d"})},
                  "messages[0].content[1].text", "invalid_value"),
    "surrogate alone": ({"messages": [{"role": "user", "content": "\ude00"}]},
                        "messages[0].content", "invalid_value"),
    "long name": ({"messages": [{"role": "user", "content": "x", "name": "n" * 65}]},
                  "messages[0].name", "string_above_max_length"),
    "user's tool call": ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "1", "function": {"name": "f"}}]}]}, "messages[0].tool_calls", "invalid_value"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "below_min_value"),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens", "below_min_value"),
    "max_tokens huge": ({"max_tokens": 2**40}, "max_tokens", "above_max_value"),
    "max_tokens part": ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens",
                                "below_min_value"),
    "n 0": ({"n": 0}, "n", "below_min_value"),
    "n 129": ({"n": 129}, "n", "above_max_value"),
    "temperature 3": ({"temperature": 3}, "temperature", "above_max_value"),
    "temperature -1": ({"temperature": -1}, "temperature", "below_min_value"),
    "temperature text": ({"temperature": "1"}, "temperature", "invalid_type"),
    "temperature true": ({"temperature": True}, "temperature", "invalid_type"),
    "top_p 1.5": ({"top_p": 1.5}, "top_p", "above_max_value"),
    "top_p 0": ({"top_p": 0}, "top_p", "below_min_value"),
    "top_k -2": ({"top_k": -2}, "top_k", "below_min_value"),
    "min_p 2": ({"min_p": 2}, "min_p", "above_max_value"),
    "seed": ({"seed": 2**63}, "seed", "above_max_value"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "above_max_value"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    "penalty 3": ({"presence_penalty": 3}, "presence_penalty", "above_max_value"),
    "penalty -3": ({"frequency_penalty": -3}, "frequency_penalty", "below_min_value"),
    "repetition 0": ({"repetition_penalty": 0}, "repetition_penalty", "below_min_value"),
    "repetition 3": ({"repetition_penalty": 3}, "repetition_penalty", "above_max_value"),
    "bias word": ({"logit_bias": {"x": 5}}, "logit_bias", "invalid_value"),
    "bias -1": ({"logit_bias": {"-1": 5}}, "logit_bias", "invalid_value"),
    "bias beyond int32": ({"logit_bias": {"99999999999": 5}}, "logit_bias", "invalid_value"),
    "bias 101": ({"logit_bias": {"5": 1, "6": 101}}, "logit_bias", "invalid_value"),
    "bias text": ({"logit_bias": {"5": "1"}}, "logit_bias", "invalid_value"),
    "bias true": ({"logit_bias": {"5": True}}, "logit_bias", "invalid_value"),
    "bias list": ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    "logprobs number": ({"logprobs": 2}, "logprobs", "invalid_type"),
    "salt empty": ({"cache_salt": ""}, "cache_salt", "empty_string"),
    "salt long": ({"cache_salt": "x" * 129}, "cache_salt", "string_above_max_length"),
    "salt number": ({"cache_salt": 5}, "cache_salt", "invalid_type"),
    "stop empty": ({"stop": ""}, "stop[0]", "empty_string"),
    "stop with empty": ({"stop": ["a", ""]}, "stop[1]", "empty_string"),
    "17 stops": ({"stop": ["a"] * 17}, "stop", "array_above_max_length"),
    "stop token": ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "below_min_value"),
    "options alone": ({"stream_options": {}}, "stream_options", "invalid_value"),
    "options, no stream": ({"stream": False, "stream_options": {"include_usage": True}},
                           "stream_options", "invalid_value"),
}  # fmt: skip
WRONG |= {
    "tools object": ({"tools": {}}, "tools", "invalid_type"),
    "tool number": ({"tools": [1]}, "tools[0]", "invalid_type"),
    "tool kind": ({"tools": [{"type": "custom"}]}, "tools[0].type", "invalid_value"),
    "tool bare": ({"tools": [{"type": "function"}]}, "tools[0].function",
                  "missing_required_parameter"),
    "tool name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
                  "tools[0].function.name", "invalid_value"),
    "tool twice": ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2},
                   "tools[1].function.name", "invalid_value"),
    "129 tools": ({"tools": [{"type": "function", "function": {"name": f"f{i}"}}
                             for i in range(129)]}, "tools", "array_above_max_length"),
    "tool surrogate": ({"tools": [{"type": "function", "function": {
        "name": "a", "parameters": {"description": "\ud800"}}}]},
        "tools[0].function.parameters", "invalid_value"),
    "choice word": ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
    "choice kind": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type",
                    "invalid_value"),
    "choice unknown": ({"tool_choice": {"type": "function", "function": {"name": "b"}}},
                       "tool_choice.function.name", "invalid_value"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "parallel text": ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
    "variables list": ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    "continued, new turn": ({"continue_final_message": True, "add_generation_prompt": True},
                            "add_generation_prompt", "invalid_value"),
    "no new turn": ({"add_generation_prompt": False}, "add_generation_prompt", "invalid_value"),
    "17 pairs": ({"metadata": {str(i): "x" for i in range(17)}}, "metadata",
                 "array_above_max_length"),
}  # fmt: skip
UNSERVED: dict[str, dict[str, Any]] = {
    "functions": {"functions": [{"name": "f"}]},
    "function_call": {"function_call": {"name": "f"}},
    "audio": {"audio": {"voice": "x"}},
    "modalities": {"modalities": ["text", "audio"]},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "chat_template": {"chat_template": "x"},
}


@pytest.mark.parametrize(("fields", "param", "code"), WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_field_is_named(
    system: System, fields: dict[str, Any], param: str, code: str
) -> None:
    await assert_refused(system, body(**fields), param, code)
    if "stream_options" not in fields:
        await assert_refused(system, body(stream=True, **fields), param, code)


async def assert_refused(system: System, sent: bytes, param: str, code: str) -> None:
    answer = await system.send(sent)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert system.llm.received == []


@pytest.mark.parametrize(("param", "fields"), UNSERVED.items(), ids=UNSERVED.keys())
async def test_what_would_change_the_answer_and_is_not_served_is_refused(
    system: System, param: str, fields: dict[str, Any]
) -> None:
    answer = await system.send(body(**fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["code"] == "unsupported_parameter"


async def test_after_all_of_these_a_plain_request_is_answered(system: System) -> None:
    for sent in NO_JSON.values():
        await system.send(sent)
    assert (await system.ask()).status_code == 200
    assert (await system.http.get("/health")).status_code == 200


async def test_the_last_of_two_equal_keys_counts(system: System) -> None:
    twice = body()[:-1] + b', "max_tokens": 3, "max_tokens": 4}'
    assert (await system.send(twice)).status_code == 200
    assert system.llm.last.message.sampling.max_token_count == 4


async def test_an_unknown_model_is_a_404_before_any_work_on_pictures(system: System) -> None:
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}]
    answer = await system.ask(model="nope", messages=[{"role": "user", "content": broken}])
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]


# Nobody waits for the answer to a cancelled request; a mismatch has a test of its own.
TOLD = [one for one in Reason if one not in {Reason.CANCELLED, Reason.ENCODER_MISMATCH}]


@pytest.mark.parametrize("reason", TOLD)
async def test_every_reason_of_the_llm_service_has_the_status_of_the_table(
    system: System, reason: Reason
) -> None:
    system.llm.script = Script(refusal=ChiasmError(reason, "Told.", retry_after=2.5))
    answer = await system.ask()
    told = as_http(ChiasmError(reason, "Told.", retry_after=2.5))
    assert answer.status_code == told.status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == CODES[reason]
    assert answer.headers.get("retry-after") == ("3" if told.status in {429, 503} else None)


async def test_a_fault_of_the_llm_service_shows_no_detail(system: System) -> None:
    system.llm.script = Script(texts=[5])  # type: ignore[list-item]
    answer = await system.ask()
    assert answer.status_code == 500
    assert "TypeError" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
