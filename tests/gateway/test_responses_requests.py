"""What the LLM service gets of a request to `/v1/responses`."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import image_pb2, llm_service_pb2
from tests.gateway.gateway_system import System
from tests.gateway.responses_client import (
    WEATHER,
    call,
    error_of,
    output,
    respond,
    response_of,
    sent,
    user,
    words,
)
from tests.scripted_llm import WIDTH, Script

pytestmark = pytest.mark.asyncio(loop_scope="module")

_S = llm_service_pb2
ODD_IMAGES = Path(__file__).parent.parent / "odd_images"
PICTURE = (ODD_IMAGES / "p_trns_single.png").read_bytes()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def picture(data: bytes = PICTURE, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data)} | more


async def turns(system: System, *items: Any, **fields: Any) -> list[tuple[str, str]]:
    """Role and text of each message that the LLM service got."""
    got = await sent(system, input=list(items), **fields)
    return [
        (_S.Role.Name(one.role).removeprefix("ROLE_").lower(), "|".join(p.text for p in one.parts))
        for one in got.message.messages
    ]


async def test_a_text_is_one_message_of_the_user(system: System) -> None:
    (message,) = (await sent(system, input="hello")).message.messages
    assert message.role == _S.ROLE_USER
    assert [part.text for part in message.parts] == ["hello"]


async def test_instructions_come_first_as_the_systems(system: System) -> None:
    got = await turns(system, {"role": "user", "content": "a"}, instructions="Be short.")
    assert got == [("system", "Be short."), ("user", "a")]


async def test_messages_of_all_roles_keep_their_order(system: System) -> None:
    answer = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [
            {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
            {"type": "refusal", "refusal": "c"},
        ],
    }  # fmt: skip
    got = await turns(
        system,
        {"role": "developer", "content": "x"},
        {"type": "message", "role": "user", "content": [words("a"), words("a2")]},
        answer,
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": [words("y")]},
        user(words("e")),
    )
    assert got == [
        ("system", "x"), ("user", "a|a2"), ("assistant", "b|c"), ("assistant", "d"),
        ("system", "y"), ("user", "e"),
    ]  # fmt: skip


async def test_a_models_thoughts_sent_back_are_left_out(system: System) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "zzz"}
    assert await turns(system, thought, user(words("a"))) == [("user", "a")]


async def test_pictures_arrive_bit_by_bit_with_their_detail(system: System) -> None:
    got = await sent(system, input=[user(words("a"), picture(), picture(detail="low"))])
    assert got.image(0, 1) == got.image(0, 2) == PICTURE
    details = [part.image.options.detail for part in got.message.messages[0].parts[1:]]
    assert details == [image_pb2.IMAGE_DETAIL_AUTO, image_pb2.IMAGE_DETAIL_LOW]


async def test_a_large_picture_arrives_bit_by_bit(system: System) -> None:
    large = PICTURE + bytes(range(256)) * 2000
    got = await sent(system, input=[user(picture(large)), call(), output(told=[picture(large)])])
    assert got.image(0, 0) == large
    assert got.image(2, 0) == large


async def test_a_large_text_that_looks_like_base64_stays_a_text(system: System) -> None:
    long = "QUJD" * 100_000
    got = await sent(system, input=[user(words(long), picture())], instructions=long)
    assert got.message.messages[0].parts[0].text == long
    assert got.message.messages[1].parts[0].text == long


async def test_embeddings_are_taken_as_in_a_chat(system: System) -> None:
    rows = np.random.default_rng(3).standard_normal((4, WIDTH)).astype(np.float32)
    given = {
        "data": base64.b64encode(rows.tobytes()).decode(), "dtype": "float32", "shape": [4, WIDTH],
    }  # fmt: skip
    got = await sent(system, input=[user({"type": "image_embeds", "image_embeds": given})])
    features = got.message.messages[0].parts[0].embedding.features
    assert list(features.shape) == [4, WIDTH]
    assert bytes(got.wired.data(features.data)) == rows.tobytes()


async def test_sampling_is_passed_on_by_its_own_names(system: System) -> None:
    got = await sent(system, temperature=0.5, top_p=0.25, max_output_tokens=9)
    sampling = got.message.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_token_count) == (0.5, 0.25, 9)
    assert not sampling.logprobs


async def test_what_is_left_out_or_null_stays_open(system: System) -> None:
    fields = ("temperature", "top_p", "max_output_tokens", "instructions", "text", "tools")
    got = await sent(system, **dict.fromkeys(fields))
    assert got.message.sampling == _S.SamplingParameters()
    assert len(got.message.messages) == 1


async def test_the_fields_of_local_servers_are_taken_as_in_a_chat(system: System) -> None:
    got = await sent(system, top_k=5, seed=7, stop=["a"], min_p=0.5, cache_salt="s")
    sampling = got.message.sampling
    assert (sampling.top_k, sampling.seed, sampling.stop, sampling.min_p) == (5, 7, ["a"], 0.5)
    assert got.message.cache_salt == "s"


async def test_logprobs_are_asked_for_only_if_they_are_included(system: System) -> None:
    got = await sent(system, top_logprobs=3)
    assert not got.message.sampling.HasField("logprobs")
    got = await sent(system, top_logprobs=3, include=["message.output_text.logprobs"])
    assert got.message.sampling.logprobs
    assert got.message.sampling.top_logprob_count == 3


async def test_what_openai_lets_include_and_never_occurs_here_is_ignored(system: System) -> None:
    await response_of(system, include=["reasoning.encrypted_content", "file_search_call.results"])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def test_the_format_of_the_text_is_the_answers_form(system: System) -> None:
    got = await sent(system, text={"format": {"type": "text"}, "verbosity": "low"})
    assert not got.message.HasField("constraint")
    got = await sent(system, text={"format": {"type": "json_object"}})
    assert got.message.constraint.json_object
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    told = await response_of(system, text={"format": form | {"description": None}})
    assert json.loads(system.llm.last.message.constraint.json_schema) == SCHEMA
    assert told["text"]["format"] == form | {"description": None}


async def test_unknown_fields_are_ignored_everywhere(system: System) -> None:
    await response_of(
        system,
        invented=1,
        reasoning={"effort": "low"},
        service_tier="flex",
        max_tool_calls=3,
        stream_options={"include_obfuscation": False},
        input=[user(words("a") | {"more": 1}) | {"status": "completed", "id": "msg_1"}],
        text={"format": {"type": "text", "more": 1}, "more": 1},
    )


async def test_errors_of_the_llm_service_name_the_place_in_the_request(system: System) -> None:
    items = [
        {"type": "reasoning", "summary": []},
        user(words("a"), picture()),
        call(),
        output(told=[words("b"), picture()]),
    ]
    places = {
        "messages[0].parts[0]": "instructions",
        "messages[1].parts[1].image": "input[1].content[1].image_url",
        "messages[1].parts[1].image.options.detail": "input[1].content[1].detail",
        "messages[3].parts[1].image": "input[3].output[1].image_url",
        "messages": "input",
        "sampling.max_token_count": "max_output_tokens",
        "sampling.temperature": "temperature",
        "constraint.json_schema": "text.format.schema",
    }
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    for field, place in places.items():
        refusal = ChiasmError(Reason.REQUEST_INVALID, "No.", field)
        system.llm.script = Script(refusal=refusal)
        answer = await respond(
            system, instructions="x", input=items, max_output_tokens=9, text=form
        )
        assert answer.json()["error"]["param"] == place, field


async def test_calls_are_part_of_the_answer_before_them(system: System) -> None:
    got = await sent(
        system,
        input=[
            user(words("Rain?")),
            {"role": "assistant", "content": "Let me look."},
            call("call_1", arguments='{"city": "Oslo"}'),
            call("call_2", arguments="{}"),
            output("call_1", "rain"),
            output("call_2", [words("sun"), words("shine")]),
            call("call_3"),
            output("call_3", ""),
        ],
        tools=[WEATHER],
    )
    question, answer, first, second, again, third = got.message.messages
    assert [part.text for part in answer.parts] == ["Let me look."]
    assert [one.id for one in answer.tool_calls] == ["call_1", "call_2"]
    assert answer.tool_calls[0].name == "weather"
    assert answer.tool_calls[0].arguments_json == '{"city": "Oslo"}'
    assert [first.role, first.tool_call_id] == [_S.ROLE_TOOL, "call_1"]
    assert [part.text for part in second.parts] == ["sun", "shine"]
    assert again.role == _S.ROLE_ASSISTANT
    assert [one.id for one in again.tool_calls] == ["call_3"]
    assert third.tool_call_id == "call_3"
    assert question.role == _S.ROLE_USER


async def test_an_output_without_its_call_is_refused(system: System) -> None:
    error = await error_of(system, input=[user(words("a")), output("call_9")])
    assert error["param"] == "input[1].call_id"
    assert "call_9" not in error["message"]


async def test_tools_are_passed_on_in_the_templates_form(system: System) -> None:
    told = await response_of(system, tools=[WEATHER], tool_choice="required")
    options = system.llm.last.message.tools
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    definition = json.loads(options.tools_json[0])
    assert definition["type"] == "function"
    assert definition["function"] | function == definition["function"]
    assert options.tool_choice == "required"
    assert told["tools"] == [WEATHER]
    assert told["tool_choice"] == "required"
    one = {"type": "function", "name": "weather"}
    told = await response_of(system, tools=[WEATHER], tool_choice=one, parallel_tool_calls=False)
    assert system.llm.last.message.tools.tool_choice == "function:weather"
    assert not system.llm.last.message.tools.parallel_tool_calls
    assert told["tool_choice"] == one
