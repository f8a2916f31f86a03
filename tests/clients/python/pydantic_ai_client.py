"""pydantic-ai: agents on OpenAIChatModel and OpenAIResponsesModel."""

import asyncio
import base64
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict
from pydantic_ai import (
    Agent,
    BinaryContent,
    Embedder,
    ModelHTTPError,
    NativeOutput,
    Tool,
    ToolOutput,
    UnexpectedModelBehavior,
)
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIChatModelSettings,
    OpenAIResponsesModel,
)
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.python.truth import (
    ANSWER_TO_RESULT,
    COLOUR,
    COLOUR_QUESTION,
    NOT_A_PICTURE,
    RESULT,
    calls_left,
    check_left,
    facts,
    load,
)

FACTS = facts()
COUNTING = FACTS.counting
STAR = FACTS.sight("star")
PROVIDER = OpenAIProvider(base_url=FACTS.url, api_key="none")
CHAT = OpenAIChatModel(FACTS.model, provider=PROVIDER, settings={"temperature": 0})
RESPONSES = OpenAIResponsesModel(FACTS.model, provider=PROVIDER, settings={"temperature": 0})
Colour = Literal["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]


class Painting(BaseModel):
    """A painted wall."""

    model_config = ConfigDict(extra="forbid")

    colour: Colour
    bright: bool


class CallsAtFirst(AbstractCapability[None]):
    """Lets the model do nothing but call a function in its first step."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": "required"} if context.run_step == 1 else {}


def code_of(error: ModelHTTPError) -> Any:
    assert isinstance(error.body, dict)
    return error.body["code"]


def picture(name: str) -> BinaryContent:
    _, _, encoded = FACTS.pictures[name].partition(",")
    return BinaryContent(base64.b64decode(encoded), media_type="image/png")


async def test_chat_gives_the_models_answer_and_its_usage() -> None:
    result = await Agent(CHAT).run(COUNTING.question)
    assert result.output == COUNTING.answer
    assert result.usage.input_tokens == COUNTING.prompt_tokens
    assert result.usage.output_tokens == COUNTING.completion_tokens
    assert result.response.finish_reason == "stop"
    assert result.response.model_name == FACTS.model


async def test_a_stream_joins_to_the_whole_answer() -> None:
    async with Agent(CHAT).run_stream(COUNTING.question) as result:
        texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
    assert len(texts) > 10
    assert "".join(texts) == COUNTING.answer
    assert result.usage.output_tokens == COUNTING.completion_tokens


async def test_a_picture_is_seen() -> None:
    for one in (STAR, FACTS.sight("seven")):
        result = await Agent(CHAT).run([picture(one.picture), one.question])
        assert result.output == one.answer


async def test_a_conversation_goes_on_with_its_history() -> None:
    first = await Agent(CHAT).run([picture("star"), STAR.question])
    second = await Agent(CHAT).run(RESULT, message_history=first.all_messages())
    assert second.output == ANSWER_TO_RESULT


def painter(called: list[str]) -> Tool[None]:
    """A tool that notes the colours that it is called with."""

    def paint(colour: Colour, bright: bool) -> str:
        """Paints the wall."""
        assert isinstance(bright, bool)
        called.append(colour)
        return RESULT

    return Tool(paint)


async def test_an_agent_calls_its_tool_and_answers_with_the_result() -> None:
    for model in (CHAT, RESPONSES):
        called: list[str] = []
        agent = Agent(model, tools=[painter(called)], capabilities=[CallsAtFirst()])
        result = await agent.run([picture("star"), COLOUR_QUESTION])
        assert called == [COLOUR["star"]]
        assert result.output == ANSWER_TO_RESULT


async def test_structured_output_comes_by_each_way() -> None:
    for kind in (ToolOutput(Painting), NativeOutput(Painting)):
        for model in (CHAT, RESPONSES):
            result = await Agent(model, output_type=kind).run([picture("star"), COLOUR_QUESTION])
            assert result.output.colour == COLOUR["star"]


async def test_structured_output_comes_in_a_stream() -> None:
    for kind in (ToolOutput(Painting), NativeOutput(Painting)):
        agent = Agent(CHAT, output_type=kind)
        async with agent.run_stream([picture("star"), COLOUR_QUESTION]) as result:
            whole = await result.get_output()
        assert whole.colour == COLOUR["star"]


async def test_structured_output_that_is_cut_is_told_as_such() -> None:
    agent = Agent(CHAT, output_type=NativeOutput(Painting), retries=0)
    with pytest.raises(UnexpectedModelBehavior):
        await agent.run("Hello", model_settings={"max_tokens": 3})


async def test_a_stream_that_is_left_ends_the_work() -> None:
    endless = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    agent = Agent(CHAT, model_settings=endless)
    before = calls_left()
    async with agent.run_stream(COUNTING.question) as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            break
        assert load()["running"] == 1
        await result.cancel()
    await asyncio.to_thread(check_left, before)


async def test_an_unknown_model_is_not_found() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        with pytest.raises(ModelHTTPError) as raised:
            await Agent(kind("no-such-model", provider=PROVIDER)).run("Hello")
        assert raised.value.status_code == 404
        assert code_of(raised.value) == "model_not_found"


async def test_a_bad_picture_is_a_bad_request_that_names_its_place() -> None:
    for kind in (CHAT, RESPONSES):
        _, _, encoded = NOT_A_PICTURE.partition(",")
        bad = BinaryContent(base64.b64decode(encoded), media_type="image/png")
        with pytest.raises(ModelHTTPError) as raised:
            await Agent(kind).run([bad, "?"])
        assert raised.value.status_code == 400
        assert isinstance(raised.value.body, dict)
        assert ".content[0]" in raised.value.body["param"]


async def test_a_text_beyond_the_context_is_a_bad_request() -> None:
    with pytest.raises(ModelHTTPError) as raised:
        await Agent(CHAT).run(FACTS.too_long)
    assert raised.value.status_code == 400
    assert code_of(raised.value) == "context_length_exceeded"


async def test_log_probabilities_are_the_models() -> None:
    settings = OpenAIChatModelSettings(openai_logprobs=True, openai_top_logprobs=2)
    result = await Agent(CHAT).run(COUNTING.question, model_settings=settings)
    told = (result.response.provider_details or {})["logprobs"]
    assert [one["logprob"] for one in told] == pytest.approx(COUNTING.logprobs, abs=1e-3)


async def test_responses_give_the_models_answer_whole_and_in_a_stream() -> None:
    result = await Agent(RESPONSES).run(COUNTING.question)
    assert result.output == COUNTING.answer
    assert result.usage.output_tokens == COUNTING.completion_tokens
    async with Agent(RESPONSES).run_stream([picture("star"), STAR.question]) as streamed:
        assert await streamed.get_output() == STAR.answer


async def test_pictures_are_embedded() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(FACTS.model, provider=PROVIDER))
    pictures = [FACTS.pictures["star"], FACTS.pictures["seven"]]
    first, second = (await embedder.embed_documents(pictures)).embeddings
    assert len(first) == len(second) > 100
    assert first != second
