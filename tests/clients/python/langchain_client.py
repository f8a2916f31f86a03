"""langchain-openai: ChatOpenAI by both interfaces of the server, and OpenAIEmbeddings."""

from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tests.clients.python.truth import (
    ANSWER_TO_RESULT,
    COLOUR,
    COLOUR_QUESTION,
    NOT_A_PICTURE,
    PAINT,
    RESULT,
    calls_left,
    check_left,
    check_painting,
    facts,
    load,
)

FACTS = facts()
COUNTING = FACTS.counting
STAR = FACTS.sight("star")


def model(**more: Any) -> ChatOpenAI:
    settings = {"model": FACTS.model, "temperature": 0, "max_retries": 0, "timeout": 60}
    return ChatOpenAI(**settings | {"base_url": FACTS.url, "api_key": "none"} | more)


MODEL = model()


def looking(picture: str, question: str) -> list[HumanMessage]:
    """A question about a picture, in langchain's own content blocks."""
    _, _, encoded = FACTS.pictures[picture].partition(",")
    block = {"type": "image", "base64": encoded, "mime_type": "image/png"}
    return [HumanMessage(content=[block, {"type": "text", "text": question}])]


LOOK = looking("star", COLOUR_QUESTION)


def test_chat_gives_the_models_answer_and_its_usage() -> None:
    answer = MODEL.invoke(COUNTING.question)
    assert answer.content == COUNTING.answer
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == FACTS.model
    usage = answer.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == COUNTING.prompt_tokens
    assert usage["output_tokens"] == COUNTING.completion_tokens
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_chat_of_the_asynchronous_client_gives_the_models_answer() -> None:
    assert (await MODEL.ainvoke(COUNTING.question)).content == COUNTING.answer


def test_chat_in_a_batch_gives_each_answer() -> None:
    asked: list[Any] = [looking(one.picture, one.question) for one in FACTS.sights]
    assert [one.content for one in MODEL.batch(asked)] == [one.answer for one in FACTS.sights]


def test_a_stream_joins_to_the_whole_answer_and_its_usage() -> None:
    chunks = list(MODEL.stream(COUNTING.question, stream_usage=True))
    assert len(chunks) > 10
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == COUNTING.answer
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_tokens"] == COUNTING.prompt_tokens
    assert whole.usage_metadata["output_tokens"] == COUNTING.completion_tokens


async def test_a_stream_of_the_asynchronous_client_joins_to_the_whole_answer() -> None:
    texts = [str(chunk.content) async for chunk in MODEL.astream(COUNTING.question)]
    assert "".join(texts) == COUNTING.answer


def test_a_picture_is_seen() -> None:
    assert MODEL.invoke(looking("star", STAR.question)).content == STAR.answer
    url = {"type": "image_url", "image_url": {"url": FACTS.pictures["seven"], "detail": "low"}}
    seven = FACTS.sight("seven")
    message = HumanMessage(content=[{"type": "text", "text": seven.question}, url])
    assert MODEL.invoke([message]).content == seven.answer


def test_a_required_tool_is_called_with_arguments_of_its_schema() -> None:
    for choice in ("required", "any", "paint"):
        bound = MODEL.bind_tools([PAINT], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(LOOK)
        [call] = answer.tool_calls
        assert not answer.invalid_tool_calls
        assert call["name"] == "paint"
        assert call["id"]
        check_painting(call["args"])


def test_a_tool_call_comes_in_a_stream_of_fragments() -> None:
    bound = MODEL.bind_tools([PAINT], tool_choice="required", parallel_tool_calls=False)
    whole: Any = None
    for chunk in bound.stream(LOOK):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    [call] = whole.tool_calls
    assert call["name"] == "paint"
    check_painting(call["args"])


def test_a_tools_result_goes_back_to_the_model() -> None:
    bound = MODEL.bind_tools([PAINT], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke(LOOK)
    assert isinstance(answer, AIMessage)
    result = ToolMessage(content=RESULT, tool_call_id=answer.tool_calls[0]["id"])
    told = MODEL.bind_tools([PAINT]).invoke([*LOOK, answer, result])
    assert told.content == ANSWER_TO_RESULT


def test_structured_output_is_parsed_by_each_method() -> None:
    schema = PAINT["function"]["parameters"] | {"title": "paint", "description": "Paints."}
    for method in ("json_schema", "function_calling"):
        answer: Any = MODEL.with_structured_output(schema, method=method).invoke(LOOK)
        check_painting(answer)


def test_structured_output_of_a_class_is_an_instance_of_it() -> None:
    class Seen(BaseModel):
        """What is seen."""

        bright: bool
        round: bool

    for strict in (True, False):
        answer = MODEL.with_structured_output(Seen, strict=strict).invoke(LOOK)
        assert isinstance(answer, Seen)


def test_a_json_object_is_an_object() -> None:
    bound = MODEL.with_structured_output(None, method="json_mode")
    assert isinstance(bound.invoke("Hello"), dict)


def test_log_probabilities_are_the_models() -> None:
    answer = model(logprobs=True, top_logprobs=2).invoke(COUNTING.question)
    told = answer.response_metadata["logprobs"]["content"]
    assert [one["logprob"] for one in told] == pytest.approx(COUNTING.logprobs, abs=1e-3)


def test_two_choices_are_answered() -> None:
    result = model(n=2).generate([[HumanMessage(COUNTING.question)]])
    assert [one.text for one in result.generations[0]] == [COUNTING.answer] * 2


def test_a_stream_that_is_left_ends_the_work() -> None:
    endless = model(max_tokens=1900, extra_body={"ignore_eos": True})
    before = calls_left()
    stream = endless.stream(COUNTING.question)
    for _ in range(6):
        next(stream)
    assert load()["running"] == 1
    stream.close()
    check_left(before)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        model(model="no-such-model").invoke("Hello")
    assert raised.value.code == "model_not_found"


def test_a_bad_picture_is_a_bad_request_that_names_its_place() -> None:
    block = {"type": "image_url", "image_url": {"url": NOT_A_PICTURE}}
    for ask in (MODEL.invoke, lambda told: list(MODEL.stream(told))):
        with pytest.raises(openai.BadRequestError) as raised:
            ask([HumanMessage(content=[block])])
        assert raised.value.param == "messages[0].content[0].image_url.url"


def test_a_text_beyond_the_context_is_told_as_such() -> None:
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        MODEL.invoke(FACTS.too_long)


def test_pictures_are_embedded() -> None:
    embeddings = OpenAIEmbeddings(
        model=FACTS.model, base_url=FACTS.url, api_key="none", check_embedding_ctx_length=False
    )  # fmt: skip
    first, second = embeddings.embed_documents([FACTS.pictures["star"], FACTS.pictures["seven"]])
    assert len(first) == len(second) > 100
    assert first != second
    assert embeddings.embed_query(FACTS.pictures["star"]) == pytest.approx(first, abs=1e-6)


RESPONSES = model(use_responses_api=True)


def test_responses_give_the_models_answer_whole_and_in_a_stream() -> None:
    answer = RESPONSES.invoke(COUNTING.question)
    assert answer.text == COUNTING.answer
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == COUNTING.completion_tokens
    assert "".join(chunk.text for chunk in RESPONSES.stream(COUNTING.question)) == COUNTING.answer


def test_responses_see_a_picture() -> None:
    assert RESPONSES.invoke(LOOK).text == COLOUR["star"]


def test_responses_call_a_required_tool_and_take_its_result() -> None:
    bound = RESPONSES.bind_tools([PAINT], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke(LOOK)
    [call] = answer.tool_calls
    check_painting(call["args"])
    result = ToolMessage(content=RESULT, tool_call_id=call["id"])
    assert RESPONSES.bind_tools([PAINT]).invoke([*LOOK, answer, result]).text == ANSWER_TO_RESULT


def test_responses_are_parsed_into_structured_output() -> None:
    schema = PAINT["function"]["parameters"] | {"title": "paint", "description": "Paints."}
    answer: Any = RESPONSES.with_structured_output(schema, method="json_schema").invoke(LOOK)
    check_painting(answer)
