"""litellm: its `openai/` provider, whole and in streams, and its own exceptions."""

import asyncio
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from tests.clients.python.truth import (
    ANSWER_TO_RESULT,
    COLOUR,
    COLOUR_QUESTION,
    NOT_A_PICTURE,
    PAINT,
    PAINT_PARAMETERS,
    RESULT,
    calls_left,
    check_left,
    check_painting,
    facts,
    load,
    picture_message,
    text_message,
)

FACTS = facts()
COUNTING = FACTS.counting
STAR = FACTS.sight("star")
SERVER: dict[str, Any] = {"api_base": FACTS.url, "api_key": "none", "max_retries": 0, "timeout": 60}
WHO: dict[str, Any] = {"model": f"openai/{FACTS.model}", **SERVER}
GREEDY: dict[str, Any] = {**WHO, "temperature": 0}
COUNT = text_message(COUNTING.question)
LOOK = picture_message(FACTS.pictures["star"], COLOUR_QUESTION)


def ask(**fields: Any) -> Any:
    return litellm.completion(**GREEDY | fields)


def test_chat_gives_the_models_answer_and_its_usage() -> None:
    answer = ask(messages=COUNT)
    assert answer.choices[0].message.content == COUNTING.answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == COUNTING.prompt_tokens
    assert answer.usage.completion_tokens == COUNTING.completion_tokens


async def test_chat_of_the_asynchronous_client_gives_the_models_answer() -> None:
    answer: Any = await litellm.acompletion(**GREEDY, messages=COUNT)
    assert answer.choices[0].message.content == COUNTING.answer


def test_a_stream_joins_to_the_whole_answer_and_its_usage() -> None:
    chunks = list(ask(messages=COUNT, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 10
    whole: Any = litellm.stream_chunk_builder(chunks, messages=COUNT)
    assert whole.choices[0].message.content == COUNTING.answer
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens == COUNTING.prompt_tokens
    assert whole.usage.completion_tokens == COUNTING.completion_tokens


async def test_a_stream_of_the_asynchronous_client_joins_to_the_whole_answer() -> None:
    stream: Any = await litellm.acompletion(**GREEDY, messages=COUNT, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == COUNTING.answer


def test_a_picture_is_seen() -> None:
    for one in FACTS.sights:
        answer = ask(messages=picture_message(FACTS.pictures[one.picture], one.question))
        assert answer.choices[0].message.content == one.answer


def test_a_required_tool_is_called_with_arguments_of_its_schema() -> None:
    named = {"type": "function", "function": {"name": "paint"}}
    for choice in ("required", named):
        answer = ask(messages=LOOK, tools=[PAINT], tool_choice=choice, parallel_tool_calls=False)
        assert answer.choices[0].finish_reason == "tool_calls"
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "paint"
        check_painting(call.function.arguments)


def test_a_tool_call_comes_in_a_stream_of_fragments() -> None:
    stream = ask(
        messages=LOOK,
        tools=[PAINT],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    )
    whole: Any = litellm.stream_chunk_builder(list(stream), messages=LOOK)
    [call] = whole.choices[0].message.tool_calls
    assert call.function.name == "paint"
    check_painting(call.function.arguments)
    assert whole.choices[0].finish_reason == "tool_calls"


def test_a_tools_result_goes_back_to_the_model() -> None:
    answer = ask(messages=LOOK, tools=[PAINT], tool_choice="required", parallel_tool_calls=False)
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
    answer = ask(messages=[*LOOK, message, result], tools=[PAINT])
    assert answer.choices[0].message.content == ANSWER_TO_RESULT


def test_structured_output_keeps_to_its_schema() -> None:
    schema = {"name": "painting", "strict": True, "schema": PAINT_PARAMETERS}
    answer = ask(messages=LOOK, response_format={"type": "json_schema", "json_schema": schema})
    check_painting(answer.choices[0].message.content)


def test_structured_output_of_a_class_is_read_by_it() -> None:
    class Seen(BaseModel):
        """What is seen."""

        bright: bool
        round: bool

    answer = ask(messages=LOOK, response_format=Seen)
    Seen.model_validate_json(answer.choices[0].message.content)


def test_log_probabilities_are_the_models() -> None:
    answer = ask(messages=COUNT, logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs.content
    assert [one.logprob for one in told] == pytest.approx(COUNTING.logprobs, abs=1e-3)


def test_two_choices_are_answered() -> None:
    answer = ask(messages=LOOK, n=2)
    assert [one.message.content for one in answer.choices] == [COLOUR["star"]] * 2


async def test_a_stream_that_is_left_ends_the_work() -> None:
    endless = {**WHO, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    before = calls_left()
    stream: Any = await litellm.acompletion(**endless, messages=COUNT, stream=True)
    for _ in range(6):
        await anext(stream)
    assert load()["running"] == 1
    await stream.aclose()
    await asyncio.to_thread(check_left, before)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(litellm.NotFoundError) as raised:
        ask(model="openai/no-such-model", messages=LOOK)
    assert raised.value.status_code == 404


def test_a_bad_picture_is_a_bad_request() -> None:
    for stream in (False, True):
        with pytest.raises(litellm.BadRequestError) as raised:
            ask(messages=picture_message(NOT_A_PICTURE, "?"), stream=stream)
        assert raised.value.status_code == 400
        assert "picture" in str(raised.value) or "image" in str(raised.value)


def test_a_text_beyond_the_context_is_told_as_such() -> None:
    for stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError):
            ask(messages=text_message(FACTS.too_long), stream=stream)
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(messages=COUNT, max_tokens=FACTS.context_length)


def test_pictures_are_embedded() -> None:
    pictures = [FACTS.pictures["star"], FACTS.pictures["seven"]]
    answer = litellm.embedding(**WHO, input=pictures)
    first, second = (one["embedding"] for one in answer.data)
    assert len(first) == len(second) > 100
    assert first != second


def test_completions_go_on_with_a_text() -> None:
    who = WHO | {"model": f"text-completion-openai/{FACTS.model}"}
    answer: Any = litellm.text_completion(**who, prompt="1 2 3", temperature=0, max_tokens=6)
    assert answer.choices[0].text


def test_responses_give_the_models_answer_whole_and_in_a_stream() -> None:
    answer: Any = litellm.responses(**GREEDY, input=COUNTING.question)
    assert answer.output_text == COUNTING.answer
    stream: Any = litellm.responses(**GREEDY, input=COUNTING.question, stream=True)
    texts = [one.delta for one in stream if one.type == "response.output_text.delta"]
    assert "".join(texts) == COUNTING.answer
