"""The official `openai` client: chat, streams, pictures, tools, structure, errors, the rest."""

import asyncio
import json
from enum import Enum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.clients.python.truth import (
    ANSWER_TO_RESULT,
    COLOUR,
    COLOUR_QUESTION,
    COLOURS,
    NOT_A_PICTURE,
    PAINT,
    PAINT_PARAMETERS,
    RESULT,
    WIPE,
    calls_left,
    check_left,
    check_painting,
    facts,
    load,
    picture_message,
    text_message,
)

FACTS = facts()
MODEL = FACTS.model
COUNTING = FACTS.counting
STAR = FACTS.sight("star")
CLIENT = openai.OpenAI(base_url=FACTS.url, api_key="none", max_retries=0, timeout=60)
CHAT = CLIENT.chat.completions
LOOK = picture_message(FACTS.pictures["star"], STAR.question)
PICK = picture_message(FACTS.pictures["star"], COLOUR_QUESTION)
ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "messages": text_message(COUNTING.question),
    "max_tokens": 1900,
    "extra_body": {"ignore_eos": True},
}
COUNT: dict[str, Any] = {
    "model": MODEL,
    "messages": text_message(COUNTING.question),
    "temperature": 0,
}

NO_END: dict[str, Any] = {"extra_body": {"ignore_eos": True}}

Colour = Enum("Colour", {name: name for name in COLOURS}, type=str)


class Painting(BaseModel):
    """What `paint` takes."""

    model_config = ConfigDict(extra="forbid")

    colour: Colour
    bright: bool


def asynchronous() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=FACTS.url, api_key="none", max_retries=0, timeout=60)


def test_chat_gives_the_models_answer_and_its_usage() -> None:
    answer = CHAT.create(**COUNT)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == COUNTING.answer
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == COUNTING.prompt_tokens
    assert usage.completion_tokens == COUNTING.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chat_tells_its_request_id() -> None:
    sent = CHAT.with_raw_response.create(**COUNT, extra_headers={"x-request-id": "clients-1"})
    assert sent.headers["x-request-id"] == "clients-1"
    assert sent.parse().choices[0].message.content == COUNTING.answer
    assert CHAT.create(**COUNT)._request_id


def test_chat_is_cut_at_max_completion_tokens() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = CHAT.create(**COUNT, **{name: 4})
        assert answer.choices[0].finish_reason == "length"
        assert COUNTING.answer.startswith(answer.choices[0].message.content or "-")
        assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_chat_ends_before_a_stop_text() -> None:
    for stop in ("12", ["12", "40"]):
        answer = CHAT.create(**COUNT, stop=stop)
        assert answer.choices[0].message.content == COUNTING.answer.split("12")[0]
        assert answer.choices[0].finish_reason == "stop"


def test_chat_takes_a_system_and_a_developer_message() -> None:
    for role in ("system", "developer"):
        told: list[Any] = [{"role": role, "content": "Be brief."}, *LOOK]
        answer = CHAT.create(model=MODEL, messages=told, temperature=0)
        assert answer.choices[0].message.content == STAR.answer


def test_chat_goes_on_over_several_turns() -> None:
    told = list(LOOK)
    answer = CHAT.create(model=MODEL, messages=told, temperature=0)
    told.append(answer.choices[0].message)
    told += text_message("Where is the star?")
    answer = CHAT.create(model=MODEL, messages=told, temperature=0)
    assert answer.choices[0].message.content == "left"


async def test_chat_of_the_asynchronous_client_answers_many_at_once() -> None:
    async with asynchronous() as client:
        asked = [
            client.chat.completions.create(
                model=MODEL,
                messages=picture_message(FACTS.pictures[one.picture], one.question),
                temperature=0,
            )
            for one in FACTS.sights
        ]
        answers = await asyncio.gather(*asked)
    assert [one.choices[0].message.content for one in answers] == [
        one.answer for one in FACTS.sights
    ]


def test_a_stream_joins_to_the_whole_answer() -> None:
    chunks = list(CHAT.create(**COUNT, stream=True))
    assert len(chunks) > 10
    deltas = [chunk.choices[0] for chunk in chunks]
    assert "".join(one.delta.content or "" for one in deltas) == COUNTING.answer
    assert deltas[0].delta.role == "assistant"
    assert not any(one.delta.role for one in deltas[1:])
    assert [one.finish_reason for one in deltas if one.finish_reason] == ["stop"]
    assert deltas[-1].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any(chunk.usage for chunk in chunks)


def test_a_stream_ends_with_usage_where_it_is_asked_for() -> None:
    *chunks, last = CHAT.create(**COUNT, stream=True, stream_options={"include_usage": True})
    assert not any(chunk.usage for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == COUNTING.prompt_tokens
    assert last.usage.completion_tokens == COUNTING.completion_tokens


def test_a_stream_gathered_by_the_client_is_the_whole_answer() -> None:
    with CHAT.stream(**COUNT) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert answer.choices[0].message.content == COUNTING.answer
    assert answer.choices[0].finish_reason == "stop"


async def test_a_stream_of_the_asynchronous_client_joins_to_the_whole_answer() -> None:
    async with asynchronous() as client:
        stream = await client.chat.completions.create(**COUNT, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == COUNTING.answer


def test_a_picture_is_seen() -> None:
    for one in FACTS.sights:
        messages = picture_message(FACTS.pictures[one.picture], one.question)
        answer = CHAT.create(model=MODEL, messages=messages, temperature=0)
        assert answer.choices[0].message.content == one.answer
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == one.prompt_tokens
        details: Any = answer.usage.prompt_tokens_details
        assert details.image_tokens == one.image_tokens > 0


def test_two_pictures_are_seen_in_their_order() -> None:
    for names, colours in ((("star", "seven"), "orange"), (("seven", "star"), "green")):
        [told] = picture_message(
            FACTS.pictures[names[0]], "What colour is it in the first picture?"
        )
        second = {"type": "image_url", "image_url": {"url": FACTS.pictures[names[1]]}}
        told["content"].insert(1, second)
        answer = CHAT.create(model=MODEL, messages=[told], temperature=0)
        assert answer.choices[0].message.content == colours


def test_a_picture_is_seen_in_a_stream() -> None:
    stream = CHAT.create(model=MODEL, messages=LOOK, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == STAR.answer


def test_a_required_tool_is_called_with_arguments_of_its_schema() -> None:
    answer = CHAT.create(
        model=MODEL,
        messages=PICK,
        temperature=0,
        tools=[PAINT],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.id
    assert call.function.name == "paint"
    check_painting(call.function.arguments)


def test_a_named_tool_of_several_is_called() -> None:
    for name in ("paint", "wipe"):
        answer = CHAT.create(
            model=MODEL,
            messages=PICK,
            temperature=0,
            tools=[PAINT, WIPE],
            tool_choice={"type": "function", "function": {"name": name}},
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == name
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == ({"colour", "bright"} if name == "paint" else {"dry"})
        assert answer.choices[0].finish_reason == "tool_calls"


def test_a_tool_that_need_not_be_called_leaves_a_text() -> None:
    for choice in ("none", "auto"):
        answer = CHAT.create(
            model=MODEL, messages=PICK, temperature=0, tools=[PAINT], tool_choice=choice
        )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == COLOUR["star"]
        assert not answer.choices[0].message.tool_calls


def test_a_tool_call_comes_in_a_stream_of_fragments() -> None:
    stream = CHAT.create(
        model=MODEL,
        messages=PICK,
        temperature=0,
        tools=[PAINT],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    choices = [chunk.choices[0] for chunk in stream]
    fragments = [one for choice in choices for one in choice.delta.tool_calls or []]
    first, *others = fragments
    assert first.index == 0 and first.id and first.type == "function"
    assert first.function is not None and first.function.name == "paint"
    assert not any(one.id for one in others)
    texts = [one.function.arguments or "" for one in fragments if one.function]
    check_painting("".join(texts))
    assert [one.finish_reason for one in choices if one.finish_reason] == ["tool_calls"]


def test_a_tool_call_gathered_by_the_client_is_parsed() -> None:
    with CHAT.stream(
        model=MODEL,
        messages=PICK,
        temperature=0,
        tools=[openai.pydantic_function_tool(Painting, name="paint")],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Painting)


def test_a_tools_result_goes_back_to_the_model() -> None:
    told: list[Any] = list(PICK)
    answer = CHAT.create(
        model=MODEL,
        messages=told,
        temperature=0,
        tools=[PAINT],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    message = answer.choices[0].message
    [call] = message.tool_calls or []
    told += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    answer = CHAT.create(model=MODEL, messages=told, temperature=0, tools=[PAINT])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ANSWER_TO_RESULT


def test_structured_output_is_parsed_into_a_model() -> None:
    for name in ("star", "seven"):
        look = picture_message(FACTS.pictures[name], COLOUR_QUESTION)
        answer = CHAT.parse(model=MODEL, messages=look, temperature=0, response_format=Painting)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.parsed is not None
        assert answer.choices[0].message.parsed.colour == COLOUR[name]


def test_structured_output_comes_in_a_stream() -> None:
    with CHAT.stream(model=MODEL, messages=PICK, temperature=0, response_format=Painting) as stream:
        answer = stream.until_done().get_final_completion()
    parsed = answer.choices[0].message.parsed
    assert parsed is not None and parsed.colour == COLOUR["star"]


def test_structured_output_that_is_cut_is_told_as_such() -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        CHAT.parse(
            model=MODEL, messages=LOOK, temperature=0, response_format=Painting, max_tokens=3
        )


def test_a_json_object_is_an_object() -> None:
    answer = CHAT.create(
        model=MODEL,
        messages=text_message("Hello"),
        temperature=0,
        response_format={"type": "json_object"},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_log_probabilities_are_the_models() -> None:
    answer = CHAT.create(**COUNT, logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None
    assert [one.logprob for one in told.content] == pytest.approx(COUNTING.logprobs, abs=1e-3)
    assert all(len(one.top_logprobs) == 2 for one in told.content)
    assert all(one.top_logprobs[0].token == one.token for one in told.content)
    spoken = b"".join(bytes(one.bytes or []) for one in told.content).decode()
    assert spoken.removesuffix("</s>") == COUNTING.answer


def test_log_probabilities_come_in_a_stream() -> None:
    stream = CHAT.create(**COUNT, logprobs=True, top_logprobs=2, stream=True)
    told = [
        one
        for chunk in stream
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content or []
    ]
    assert [one.logprob for one in told] == pytest.approx(COUNTING.logprobs, abs=1e-3)


def test_two_choices_are_answered() -> None:
    answer = CHAT.create(model=MODEL, messages=LOOK, temperature=0, n=2)
    assert [one.index for one in answer.choices] == [0, 1]
    assert [one.message.content for one in answer.choices] == [STAR.answer] * 2


def test_two_choices_come_in_a_stream() -> None:
    texts, ends = {0: "", 1: ""}, []
    for chunk in CHAT.create(model=MODEL, messages=LOOK, temperature=0, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == {0: STAR.answer, 1: STAR.answer}
    assert sorted(ends) == [0, 1]


def test_a_seed_draws_the_same_answer_twice() -> None:
    drawn = [
        CHAT.create(model=MODEL, messages=LOOK, temperature=2, seed=7, max_tokens=40, **NO_END)
        .choices[0]
        .message.content
        for _ in range(2)
    ]
    other = CHAT.create(model=MODEL, messages=LOOK, temperature=2, seed=8, max_tokens=40, **NO_END)
    assert drawn[0] == drawn[1]
    assert drawn[0] != other.choices[0].message.content


def test_a_stream_that_is_left_ends_the_work() -> None:
    before = calls_left()
    stream = CHAT.create(**ENDLESS, stream=True)
    for _ in range(6):
        next(stream)
    assert load()["running"] == 1
    stream.close()
    check_left(before)


async def test_a_call_that_is_cancelled_ends_the_work() -> None:
    before = calls_left()
    async with asynchronous() as client:
        asking = asyncio.create_task(client.chat.completions.create(**ENDLESS))
        while (await asyncio.to_thread(load))["running"] == 0:
            await asyncio.sleep(0.02)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await asyncio.to_thread(check_left, before)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        CHAT.create(model="no-such-model", messages=LOOK)
    assert (raised.value.status_code, raised.value.param) == (404, "model")
    assert raised.value.code == "model_not_found"
    assert raised.value.type == "invalid_request_error"
    assert raised.value.request_id


def test_a_bad_picture_is_a_bad_request_that_names_its_place() -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            CHAT.create(model=MODEL, messages=picture_message(NOT_A_PICTURE, "?"), stream=stream)
        assert raised.value.param == "messages[0].content[0].image_url.url"
        assert raised.value.code in {"image_parse_error", "unsupported_image_media_type"}
        assert raised.value.type == "invalid_request_error"


def test_a_text_beyond_the_context_is_a_bad_request() -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            CHAT.create(model=MODEL, messages=text_message(FACTS.too_long), stream=stream)
        assert raised.value.code == "context_length_exceeded"
        assert raised.value.param == "messages"
        assert str(FACTS.context_length) in raised.value.message.replace(",", "")


def test_a_wrong_value_is_a_bad_request_that_names_its_field() -> None:
    wrong: list[tuple[str, Any]] = [("temperature", 3), ("n", 0), ("top_logprobs", 21)]
    for name, value in wrong:
        with pytest.raises(openai.BadRequestError) as raised:
            CHAT.create(model=MODEL, messages=LOOK, **{name: value})
        assert raised.value.param == name


def test_an_unknown_path_is_not_found() -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        CLIENT.get("/nothing", cast_to=object)
    assert raised.value.type == "invalid_request_error"


def test_models_are_listed_and_retrieved() -> None:
    [listed] = CLIENT.models.list().data
    assert (listed.id, listed.object) == (MODEL, "model")
    assert listed.created > 1_600_000_000
    assert listed.owned_by
    assert CLIENT.models.retrieve(MODEL) == listed
    with pytest.raises(openai.NotFoundError) as raised:
        CLIENT.models.retrieve("no-such-model")
    assert raised.value.code == "model_not_found"


def test_pictures_are_embedded() -> None:
    urls = [FACTS.pictures["star"], FACTS.pictures["seven"]]
    # The client asks for base64 unless it is told otherwise.
    for more in ({}, {"encoding_format": "float"}):
        answer = CLIENT.embeddings.create(model=MODEL, input=urls, **more)  # type: ignore[arg-type]
        first, second = (one.embedding for one in answer.data)
        assert [one.index for one in answer.data] == [0, 1]
        assert len(first) == len(second) > 100
        assert first != second
        assert answer.usage.prompt_tokens > 0
    again = CLIENT.embeddings.create(model=MODEL, input=urls[0]).data[0].embedding
    assert again == pytest.approx(first, abs=1e-6)


def test_a_text_is_not_embedded() -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        CLIENT.embeddings.create(model=MODEL, input="a text")
    assert (raised.value.param or "").startswith("input")


def test_completions_go_on_with_a_text() -> None:
    whole = CLIENT.completions.create(model=MODEL, prompt="1 2 3", temperature=0, max_tokens=6)
    assert whole.object == "text_completion"
    [choice] = whole.choices
    assert choice.finish_reason in {"length", "stop"}
    chunks = list(
        CLIENT.completions.create(
            model=MODEL, prompt="1 2 3", temperature=0, max_tokens=6, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert choice.text


RESPOND: dict[str, Any] = {"model": MODEL, "temperature": 0, "store": False}
SEE: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": FACTS.pictures["star"], "detail": "auto"},
            {"type": "input_text", "text": COLOUR_QUESTION},
        ],
    }
]
PAINT_RESPONSES: Any = {
    "type": "function",
    "name": "paint",
    "description": "Paints the wall.",
    "parameters": PAINT_PARAMETERS,
    "strict": True,
}


def test_responses_give_the_models_answer_and_its_usage() -> None:
    answer = CLIENT.responses.create(**RESPOND, input=COUNTING.question)
    assert answer.status == "completed"
    assert answer.output_text == COUNTING.answer
    assert answer.usage is not None
    assert answer.usage.input_tokens == COUNTING.prompt_tokens
    assert answer.usage.output_tokens == COUNTING.completion_tokens


def test_responses_come_in_a_stream() -> None:
    events = list(CLIENT.responses.create(**RESPOND, input=COUNTING.question, stream=True))
    assert events[0].type == "response.created"
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == COUNTING.answer
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == COUNTING.answer
    with CLIENT.responses.stream(**RESPOND, input=COUNTING.question) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == COUNTING.answer


def test_responses_see_a_picture() -> None:
    assert CLIENT.responses.create(**RESPOND, input=SEE).output_text == COLOUR["star"]


def test_responses_call_a_required_tool_and_take_its_result() -> None:
    answer = CLIENT.responses.create(
        **RESPOND, input=SEE, tools=[PAINT_RESPONSES], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    [call] = answer.output
    assert call.type == "function_call"
    assert call.name == "paint"
    check_painting(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    told = [*SEE, call, result]
    answer = CLIENT.responses.create(**RESPOND, input=told, tools=[PAINT_RESPONSES])
    assert answer.status == "completed"
    assert answer.output_text == ANSWER_TO_RESULT


def test_responses_stream_a_tool_call() -> None:
    events = list(
        CLIENT.responses.create(
            **RESPOND, input=SEE, tools=[PAINT_RESPONSES], tool_choice="required",
            parallel_tool_calls=False, stream=True,
        )
    )  # fmt: skip
    texts = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
    check_painting("".join(texts))
    assert events[-1].type == "response.completed"


def test_responses_are_parsed_into_a_model() -> None:
    answer = CLIENT.responses.parse(**RESPOND, input=SEE, text_format=Painting)
    assert isinstance(answer.output_parsed, Painting)


def test_responses_that_are_cut_are_incomplete() -> None:
    answer = CLIENT.responses.create(**RESPOND, input=COUNTING.question, max_output_tokens=16)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert COUNTING.answer.startswith(answer.output_text)


def test_responses_refuse_what_needs_a_memory() -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        CLIENT.responses.create(**RESPOND, input="Hello", previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        CLIENT.responses.create(model="no-such-model", input="Hello")
