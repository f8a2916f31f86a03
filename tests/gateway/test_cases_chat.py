"""Conversations as clients really send them, and answers as their parsers want them."""

import json
from collections import Counter
from typing import Any

import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from tests.gateway.gateway_system import System
from tests.gateway.test_gateway_answers import chunks_of
from tests.scripted_llm import MODEL, Script, finished

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
Json = dict[str, Any]
USER: Json = {"role": "user", "content": "What is the weather in Oslo and in Rome?"}
ASK: Any = {"model": MODEL, "messages": [USER]}


def tool(name: str) -> Json:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(number: int, arguments: str = '{"place": "Oslo"}') -> Json:
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int, content: Any) -> Json:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


CONTENTS: dict[str, Json] = {
    "null": {"content": None},
    "absent": {},
    "no parts": {"content": []},
    "empty": {"content": ""},
    "text": {"content": "I look it up."},
    "parts": {"content": [{"type": "text", "text": "I look it up."}]},
}
RESULTS: dict[str, Any] = {
    "text": "4 degrees",
    "empty": "",
    "parts": [{"type": "text", "text": "4 "}, {"type": "text", "text": "degrees"}],
}


@pytest.mark.parametrize("given", RESULTS.values(), ids=RESULTS.keys())
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"tools": [tool("weather")]}])
async def test_a_turn_of_tools_is_taken_back_in_every_form(
    system: System, content: Json, given: Any, fields: Json
) -> None:
    called = {"role": "assistant", "tool_calls": [call(1), call(2)]} | content
    answer = await system.ask(messages=[USER, called, result(1, given), result(2, given)], **fields)
    assert answer.status_code == 200, answer.text
    _, turn, first, second = system.llm.last.message.messages
    assert [one.id for one in turn.tool_calls] == ["call_1", "call_2"]
    said = "".join(part.text for part in turn.parts)
    assert said == ("I look it up." if content.get("content") else "")
    expected = given if isinstance(given, str) else "4 degrees"
    assert ["".join(part.text for part in one.parts) for one in (first, second)] == [expected] * 2
    assert [one.tool_call_id for one in (first, second)] == ["call_1", "call_2"]


@pytest.mark.parametrize("arguments", ["{", "", "null", "[1]", '{"a": NaN}', "{'a': 1}", "\u2028"])
async def test_broken_arguments_in_the_history_are_passed_on_as_text(
    system: System, arguments: str
) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call(1, arguments)]}
    answer = await system.ask(messages=[USER, turn, result(1, "4 degrees")])
    assert answer.status_code == 200, answer.text
    [told] = system.llm.last.message.messages[1].tool_calls
    assert told.arguments_json == arguments


BAD_TURNS: dict[str, tuple[Json, str]] = {
    "calls as an object": ({"tool_calls": {}}, "messages[1].tool_calls"),
    "no id": ({"tool_calls": [{"function": {"name": "f"}}]}, "messages[1].tool_calls[0].id"),
    "no function": ({"tool_calls": [{"id": "1"}]}, "messages[1].tool_calls[0].function"),
    "arguments as an object": (
        {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    "NUL in arguments": (
        {"tool_calls": [call(1, '{"a": "\0"}')]},
        "messages[1].tool_calls[0].function.arguments",
    ),
}


@pytest.mark.parametrize(("turn", "param"), BAD_TURNS.values(), ids=BAD_TURNS.keys())
async def test_calls_of_another_shape_are_refused_by_their_place(
    system: System, turn: Json, param: str
) -> None:
    answer = await system.ask(messages=[USER, {"role": "assistant"} | turn])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert system.llm.received == []


ORDERS: dict[str, list[str]] = {
    "two of the user": ["user", "user"],
    "system in the middle": ["user", "system", "user"],
    "system last": ["user", "assistant", "system"],
    "assistant first": ["assistant", "user"],
    "assistant last": ["user", "assistant"],
    "two of the assistant": ["user", "assistant", "assistant", "user"],
    "developer": ["developer", "user"],
    "system alone": ["system"],
}


@pytest.mark.parametrize("roles", ORDERS.values(), ids=ORDERS.keys())
async def test_turns_of_any_order_reach_the_llm_service_as_they_are(
    system: System, roles: list[str]
) -> None:
    turns = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    assert (await system.ask(messages=turns)).status_code == 200
    told = system.llm.last.message.messages
    assert [one.parts[0].text for one in told] == [str(number) for number in range(len(roles))]
    sent = {"user": 2, "assistant": 3, "system": 1, "developer": 1}
    assert [one.role for one in told] == [sent[role] for role in roles]


async def test_what_a_client_sends_back_of_an_answer_is_taken(system: System) -> None:
    """As it came, with everything that stands in it."""
    first = (await system.ask()).json()["choices"][0]["message"]
    echoed = first | {"id": "m", "reasoning_content": "hm", "annotations": [], "audio": None}
    answer = await system.ask(messages=[USER, echoed, USER])
    assert answer.status_code == 200, answer.text
    assert system.llm.last.message.messages[1].parts[0].text == "Hello, world"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 99}, 4),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": 5}, 5),
    ],
)
async def test_the_limit_of_tokens_is_told_and_the_cut_comes_back(
    system: System, fields: Json, expected: int
) -> None:
    system.llm.script = Script(end=finished(_S.FINISH_REASON_LENGTH))
    for stream in (False, True):
        assert '"finish_reason":"length"' in (await system.ask(stream=stream, **fields)).text
        assert system.llm.last.message.sampling.max_token_count == expected


@pytest.mark.parametrize("stop", [[], None])
async def test_no_stop_text_is_the_same_as_none_given(system: System, stop: Any) -> None:
    assert (await system.ask()).status_code == 200
    plain = system.llm.last.message
    assert (await system.ask(stop=stop)).status_code == 200
    assert system.llm.last.message == plain


def _told(token: bytes, logprob: float, *top: tuple[bytes, float]) -> llm_service_pb2.TokenLogprob:
    alternatives = [_S.TokenLogprob(token=one, logprob=value) for one, value in top]
    return _S.TokenLogprob(token=token, logprob=logprob, top=alternatives)


async def test_openais_client_reads_streamed_log_probabilities(system: System) -> None:
    tops = [(b"He", -0.1), (b"I", -3.0)], [(b"llo", -0.2), (b"y", -float("inf"))]
    system.llm.script = Script(
        deltas=[
            [_S.Delta(text="He", token_ids=[1], logprobs=[_told(b"He", -0.1, *tops[0])])],
            [_S.Delta(text="llo", token_ids=[2], logprobs=[_told(b"llo", -0.2, *tops[1])])],
        ]
    )
    stream = await system.openai.chat.completions.create(
        **ASK, stream=True, logprobs=True, top_logprobs=2
    )
    told = [
        one
        async for chunk in stream
        for choice in chunk.choices
        for one in (choice.logprobs.content if choice.logprobs else None) or []
    ]
    assert [one.token for one in told] == ["He", "llo"]
    assert [bytes(one.bytes or []) for one in told] == [b"He", b"llo"]
    assert [[top.token for top in one.top_logprobs] for one in told] == [["He", "I"], ["llo", "y"]]
    assert told[1].top_logprobs[1].logprob == -9999.0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_impossible_token_of_twenty_leaves_the_json_valid(
    system: System, stream: bool
) -> None:
    tops = [(b"{", 0.0), *((b"x", -float("inf")) for _ in range(19))]
    delta = _S.Delta(text="{", token_ids=[1], logprobs=[_told(b"{", 0.0, *tops)])
    system.llm.script = Script(deltas=[[delta]])
    answer = await system.ask(stream=stream, logprobs=True, top_logprobs=20)
    pieces = answer.text.split("\n\n")[1].removeprefix("data: ") if stream else answer.text

    def refuse(word: str) -> None:
        raise AssertionError(word)

    [choice] = json.loads(pieces, parse_constant=refuse)["choices"]
    [told] = choice["logprobs"]["content"]
    assert [one["logprob"] for one in told["top_logprobs"]] == [0.0] + [-9999.0] * 19


@pytest.mark.parametrize("bias", [{"99999999": 5}, {"2147483647": -100}])
async def test_a_bias_beyond_the_vocabulary_is_refused_by_its_field(
    system: System, bias: Json
) -> None:
    """Only the LLM service knows how large the vocabulary is."""
    system.llm.script = Script(
        refusal=ChiasmError(Reason.REQUEST_INVALID, "No such token.", "sampling.logit_bias")
    )
    answer = await system.ask(logit_bias=bias)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


def begun(index: int, name: str, choice: int = 0) -> llm_service_pb2.Delta:
    delta = _S.ToolCallDelta(call_index=index, id=f"call_{index}", name=name)
    return _S.Delta(choice_index=choice, tool_calls=[delta])


def more(index: int, text: str, choice: int = 0) -> llm_service_pb2.Delta:
    delta = _S.ToolCallDelta(call_index=index, arguments_json=text)
    return _S.Delta(choice_index=choice, tool_calls=[delta])


OSLO, ROME = '{"place": "Oslo"}', '{"place": "R\u00f4me \\" \U0001f600"}'


def ended(*calls: llm_service_pb2.ToolCall) -> llm_service_pb2.Finished:
    end = finished(_S.FINISH_REASON_TOOL_CALLS)
    end.choices[0].tool_calls.extend(calls)
    return end


TWO_CALLS = Script(
    deltas=[
        [begun(0, "weather")],
        [more(0, OSLO[:5])],
        [more(0, OSLO[5:])],
        [begun(1, "weather")],
        *[[more(1, letter)] for letter in ROME],
    ],
    end=ended(
        _S.ToolCall(id="call_0", name="weather", arguments_json=OSLO),
        _S.ToolCall(id="call_1", name="weather", arguments_json=ROME),
    ),
)
TOOLS: Json = {"tools": [tool("weather"), tool("time")]}


async def test_calls_of_a_whole_answer_have_ids_and_arguments_as_text(system: System) -> None:
    system.llm.script = TWO_CALLS
    (choice,) = (await system.ask(**TOOLS)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [one["id"] for one in calls] == ["call_0", "call_1"]
    assert [one["type"] for one in calls] == ["function"] * 2
    assert [one["function"] for one in calls] == [
        {"name": "weather", "arguments": OSLO},
        {"name": "weather", "arguments": ROME},
    ]


async def test_streamed_calls_have_one_id_each_first_and_arguments_in_pieces(
    system: System,
) -> None:
    system.llm.script = TWO_CALLS
    chunks = [chunk["choices"][0] for chunk in await chunks_of(system, **TOOLS)]
    deltas = [one for chunk in chunks for one in chunk["delta"].get("tool_calls", [])]
    assert Counter(one["index"] for one in deltas if "id" in one) == {0: 1, 1: 1}
    for index, arguments in enumerate((OSLO, ROME)):
        first, *others = [one for one in deltas if one["index"] == index]
        assert (first["id"], first["type"]) == (f"call_{index}", "function")
        assert first["function"]["name"] == "weather"
        assert not any({"id", "type"} & set(one) or "name" in one["function"] for one in others)
        joined = "".join(one["function"]["arguments"] for one in (first, *others))
        assert joined == arguments
        json.loads(joined)
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]


async def test_openais_client_accumulates_streamed_calls(system: System) -> None:
    system.llm.script = TWO_CALLS
    async with system.openai.chat.completions.stream(**ASK, **TOOLS) as stream:
        answer = await stream.get_final_completion()
    [choice] = answer.choices
    calls = choice.message.tool_calls or []
    assert [one.function.arguments for one in calls] == [OSLO, ROME]
    assert [one.id for one in calls] == ["call_0", "call_1"]


async def test_choices_call_tools_each_by_its_own_index(system: System) -> None:
    end = finished(_S.FINISH_REASON_TOOL_CALLS, _S.FINISH_REASON_STOP)
    end.choices[0].tool_calls.add(id="call_0", name="weather", arguments_json="{}")
    texts = [_S.Delta(choice_index=1, text="No.")]
    system.llm.script = Script(deltas=[[begun(0, "weather")], texts, [more(0, "{}")]], end=end)
    one, two = (await system.ask(n=2, **TOOLS)).json()["choices"]
    assert one["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert (two["message"]["content"], two["finish_reason"]) == ("No.", "stop")
    assert "tool_calls" not in two["message"] or not two["message"]["tool_calls"]


CHOICES: dict[str, Any] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "function:time": {"type": "function", "function": {"name": "time"}},
}


@pytest.mark.parametrize(("expected", "choice"), CHOICES.items(), ids=CHOICES.keys())
async def test_the_choice_of_a_tool_reaches_the_llm_service(
    system: System, expected: str, choice: Any
) -> None:
    answer = await system.ask(tool_choice=choice, parallel_tool_calls=False, **TOOLS)
    assert answer.status_code == 200, answer.text
    told = system.llm.last.message.tools
    assert [json.loads(one) for one in told.tools_json] == TOOLS["tools"]
    assert (told.tool_choice, told.parallel_tool_calls) == (expected, False)
    assert told.HasField("parallel_tool_calls")


@pytest.mark.parametrize("choice", ["none", "auto", None])
async def test_a_choice_that_forces_nothing_needs_no_tools(system: System, choice: Any) -> None:
    forms: list[Json] = [{}, {"tools": []}, {"tools": None}]
    for tools in forms:
        assert (await system.ask(tool_choice=choice, **tools)).status_code == 200
        assert not system.llm.last.message.tools.tools_json


NO_CHOICE: dict[str, tuple[Json, str]] = {
    "required of none": ({"tool_choice": "required"}, "tool_choice"),
    "a function of none": ({"tool_choice": CHOICES["function:time"]}, "tool_choice"),
    "another function": (
        {"tools": [tool("weather")], "tool_choice": CHOICES["function:time"]}, "tool_choice"
    ),
    "unknown word": (TOOLS | {"tool_choice": "always"}, "tool_choice"),
    "number": (TOOLS | {"tool_choice": 1}, "tool_choice"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "odd name": ({"tools": [tool("a b")]}, "tools[0].function.name"),
    "tools as an object": ({"tools": {}}, "tools"),
    "129 tools": ({"tools": [tool(f"t{number}") for number in range(129)]}, "tools"),
    "parallel as a word": (TOOLS | {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), NO_CHOICE.values(), ids=NO_CHOICE.keys())
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_cannot_be_called_as_wished_are_refused_by_their_place(
    system: System, fields: Json, param: str, stream: bool
) -> None:
    answer = await system.ask(stream=stream, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
    assert system.llm.received == []


NAMES = ["ann", "a b", "\u00e9", "\U0001f600", "a\nb", '"}', "<|im_end|>", "{{ x }}", "n" * 64]


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_of_odd_characters_is_passed_on_as_it_is(system: System, name: str) -> None:
    answer = await system.ask(messages=[USER | {"name": name}])
    assert answer.status_code == 200, answer.text
    assert system.llm.last.message.messages[0].name == name


@pytest.mark.parametrize("name", ["n" * 65, "a\0b", "\ud83d", 5, ["a"]])
async def test_a_name_that_cannot_be_is_refused_by_its_place(system: System, name: Any) -> None:
    answer = await system.send(json.dumps(ASK | {"messages": [USER | {"name": name}]}).encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].name")


METADATA: dict[str, tuple[Any, int]] = {
    "16 pairs": ({f"k{number}": "v" for number in range(16)}, 200),
    "17 pairs": ({f"k{number}": "v" for number in range(17)}, 400),
    "key of 64": ({"k" * 64: "v"}, 200),
    "key of 65": ({"k" * 65: "v"}, 400),
    "value of 512": ({"k": "v" * 512}, 200),
    "value of 513": ({"k": "v" * 513}, 400),
    "number": ({"k": 5}, 400),
    "list": (["k"], 400),
    "none": ({}, 200),
    "null": (None, 200),
}


@pytest.mark.parametrize(("metadata", "status"), METADATA.values(), ids=METADATA.keys())
async def test_metadata_is_taken_within_openais_bounds(
    system: System, metadata: Any, status: int
) -> None:
    answer = await system.ask(metadata=metadata)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert answer.json()["error"]["param"].startswith("metadata")
        assert "vvv" not in answer.text and "kkk" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("user", ["ann", "", "u" * 512, "\u00e9\n"])
async def test_any_user_is_taken(system: System, user: str) -> None:
    assert (await system.ask(user=user)).status_code == 200


PLACES: dict[str, tuple[Json, str]] = {
    "content": ({"messages": [{"role": "user", "content": "@"}]}, "messages[0].content"),
    "part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "@"}]}]},
        "messages[0].content[0].text",
    ),
    "tool's result": ({"messages": [USER, result(1, "@")]}, "messages[1].content"),
    "id of a call": (
        {"messages": [USER, {"role": "tool", "tool_call_id": "@", "content": "x"}]},
        "messages[1].tool_call_id",
    ),
    "refusal": (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "@"}]}]},
        "messages[0].content[0].refusal",
    ),
    "stop": ({"stop": ["a", "@"]}, "stop[1]"),
    "model": ({"model": "@"}, "model"),
    "description": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "@"}}]},
        "tools[0].function.description",
    ),
}


@pytest.mark.parametrize(("fields", "param"), PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("odd", ["\\u0000", "\\ud83d", "\\ude00", "\\ud83d\\ud83d"])
async def test_what_is_no_character_is_refused_wherever_it_stands(
    system: System, fields: Json, param: str, odd: str
) -> None:
    sent = json.dumps(ASK | fields).replace("@", f"a{odd}b").encode()
    answer = await system.send(sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert system.llm.received == []


async def test_a_whole_pair_of_surrogates_is_one_character(system: System) -> None:
    sent = json.dumps(ASK | {"messages": [USER | {"content": "\U0001f600"}]}).encode()
    assert b"\\ud83d\\ude00" in sent
    assert (await system.send(sent)).status_code == 200
    assert system.llm.last.message.messages[0].parts[0].text == "\U0001f600"


@pytest.mark.parametrize(
    ("twice", "expected"),
    [
        (b'"messages":[],"messages":[{"role":"user","content":"b"}]', "b"),
        (b'"messages":[{"role":"user","content":"a","content":"b"}]', "b"),
        (b'"messages":[{"role":"system","role":"user","content":"b"}]', "b"),
        (b'"messages":[{"role":"user","content":[{"text":"a","type":"text","text":"b"}]}]', "b"),
        (b'"messages":[{"role":"user","content":"a"}],"messages":null', None),
    ],
)
async def test_the_last_of_equal_keys_counts_at_every_depth(
    system: System, twice: bytes, expected: str | None
) -> None:
    answer = await system.send(b'{"model":"%b",%b}' % (MODEL.encode(), twice))
    if expected is None:
        assert answer.status_code == 400
        return
    assert answer.status_code == 200, answer.text
    [message] = system.llm.last.message.messages
    assert (message.role, message.parts[0].text) == (_S.ROLE_USER, expected)


async def test_usage_adds_up_and_names_pictures_text_and_what_was_cached(system: System) -> None:
    usage = (await system.ask()).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert details["image_tokens"] + details["text_tokens"] == usage["prompt_tokens"]
    assert details["cached_tokens"] <= usage["prompt_tokens"]
    *_, last = await chunks_of(system, stream_options={"include_usage": True})
    assert last["usage"] == usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{}, {"max_completion_tokens": 5}, {"max_tokens": 5}])
async def test_an_overflow_is_told_before_any_event_by_a_code_for_programs(
    system: System, stream: bool, asked: Json
) -> None:
    text = "The prompt has 33 tokens; the context has 32."
    system.llm.script = Script(
        refusal=ChiasmError(Reason.CONTEXT_LENGTH_EXCEEDED, text, "messages")
    )
    answer = await system.ask(stream=stream, **asked)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"] == text
