"""instructor: structured answers by each of its modes that an OpenAI server serves."""

from typing import Any, Literal

import instructor
import openai
import pytest
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict

from tests.clients.python.truth import COLOUR, COLOUR_QUESTION, NOT_A_PICTURE, facts, text_message

FACTS = facts()
Mode = instructor.Mode
CALLS = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS)
Colour = Literal["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]


class Painting(BaseModel):
    """A painted wall."""

    model_config = ConfigDict(extra="forbid")

    colour: Colour
    bright: bool


def client(mode: instructor.Mode) -> Any:
    official = openai.OpenAI(base_url=FACTS.url, api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(official, mode=mode)


def asynchronous(mode: instructor.Mode) -> Any:
    official = openai.AsyncOpenAI(base_url=FACTS.url, api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(official, mode=mode)


def looking(picture: str) -> list[Any]:
    image = instructor.Image.from_base64(FACTS.pictures[picture])
    return [{"role": "user", "content": [image, COLOUR_QUESTION]}]


def asked(picture: str) -> dict[str, Any]:
    return {
        "model": FACTS.model,
        "messages": looking(picture),
        "response_model": Painting,
        "temperature": 0,
        "max_retries": 0,
    }


def test_an_answer_by_json_schema_tells_the_pictures_colour() -> None:
    for picture, colour in COLOUR.items():
        answer = client(Mode.JSON_SCHEMA).create(**asked(picture))
        assert isinstance(answer, Painting)
        assert answer.colour == colour


@pytest.mark.parametrize("mode", CALLS, ids=[mode.name.lower() for mode in CALLS])
def test_an_answer_follows_the_picture_by(mode: instructor.Mode) -> None:
    # The model was taught no functions; it sees, but does not always name, what it sees.
    star, seven = (client(mode).create(**asked(picture)) for picture in COLOUR)
    assert isinstance(star, Painting) and isinstance(seven, Painting)
    assert star.colour == COLOUR["star"]
    assert seven.colour != star.colour


async def test_an_answer_of_the_asynchronous_client_is_an_instance() -> None:
    answer = await asynchronous(Mode.TOOLS).create(**asked("star"))
    assert answer.colour == COLOUR["star"]


def test_an_answer_comes_with_the_completion_that_it_was_read_from() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        answer, completion = client(mode).create_with_completion(**asked("star"))
        assert answer.colour == COLOUR["star"]
        assert completion.usage.prompt_tokens > 16
        assert completion.usage.completion_tokens > 3


def test_a_partial_answer_grows_to_the_whole_one() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        partial = list(client(mode).create_partial(**asked("star")))
        assert len(partial) > 1
        assert partial[-1].colour == COLOUR["star"]
        assert isinstance(partial[-1].bright, bool)


def test_a_plain_answer_is_left_as_it_is() -> None:
    answer = client(Mode.TOOLS).create(**asked("star") | {"response_model": None})
    assert answer.choices[0].message.content == COLOUR["star"]


def test_an_answer_that_is_cut_is_told_as_such() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        with pytest.raises(IncompleteOutputException):
            client(mode).create(**asked("star") | {"max_tokens": 4})


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises((InstructorRetryException, openai.NotFoundError)) as raised:
        client(Mode.TOOLS).create(**asked("star") | {"model": "no-such-model"})
    assert isinstance(cause(raised.value), openai.NotFoundError)


def test_a_bad_picture_is_a_bad_request_that_names_its_place() -> None:
    image = {"type": "image_url", "image_url": {"url": NOT_A_PICTURE}}
    messages = [{"role": "user", "content": [image]}]
    with pytest.raises((InstructorRetryException, openai.BadRequestError)) as raised:
        client(Mode.TOOLS).create(**asked("star") | {"messages": messages})
    fault = cause(raised.value)
    assert isinstance(fault, openai.BadRequestError)
    assert fault.param == "messages[0].content[0].image_url.url"


def test_a_text_beyond_the_context_is_a_bad_request() -> None:
    with pytest.raises((InstructorRetryException, openai.BadRequestError)) as raised:
        client(Mode.JSON_SCHEMA).create(
            **asked("star") | {"messages": text_message(FACTS.too_long)}
        )
    fault = cause(raised.value)
    assert isinstance(fault, openai.BadRequestError)
    assert fault.code == "context_length_exceeded"


def cause(error: BaseException | None) -> BaseException | None:
    """The official client's error within instructor's own."""
    while error is not None and not isinstance(error, openai.APIError):
        error = error.__cause__ or error.__context__
    return error
