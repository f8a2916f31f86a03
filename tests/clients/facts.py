"""What the clients' answers are held against: the same questions asked by gRPC."""

import base64
import json
from dataclasses import asdict, dataclass
from typing import Any

from chiasm.cli.samples import sample_pictures, sample_questions
from chiasm.client import Client
from chiasm.conversation import Sampling, user

COUNTING = "Count to 50."
GREEDY = Sampling(temperature=0, top_logprobs=2)


@dataclass(frozen=True)
class Truth:
    """One question and the model's own answer to it.

    Attributes:
        picture: the name of the picture that it is about, or "".
        prompt_tokens: of the whole prompt; the picture takes `image_tokens` of them.
        logprobs: of the answer's tokens.
    """

    picture: str
    question: str
    answer: str
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    logprobs: list[float]


@dataclass(frozen=True)
class Facts:
    """All that a client's tests know of the system.

    Attributes:
        url: of the interface, with its `/v1`.
        load_url: tells as JSON how many sequences the LLM service has in hand.
        pictures: data URLs by name.
        counting: a long answer to a question without a picture.
        sights: short answers about pictures.
    """

    url: str
    load_url: str
    model: str
    context_length: int
    pictures: dict[str, str]
    counting: Truth
    sights: list[Truth]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def gathered(url: str, load_url: str, llm: str) -> Facts:
    """Asks the LLM service at `llm`; it must know its samples."""
    with Client(llm, timeout=60) as client:
        model = client.get_model()
        sights = [_sight(client, *one) for one in _questions()]
        return Facts(
            url=url,
            load_url=load_url,
            model=model.model_id,
            context_length=model.context_length,
            pictures={path.stem: data_url(path.read_bytes()) for path in sample_pictures()},
            counting=_asked(client, "", COUNTING, COUNTING),
            sights=sights,
        )


def data_url(picture: bytes) -> str:
    """A PNG file in a URL."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _questions() -> list[tuple[str, bytes, str, str]]:
    return [
        (one.picture.stem, one.picture.read_bytes(), one.question, one.answer)
        for one in sample_questions()
    ]


def _sight(client: Client, name: str, picture: bytes, question: str, answer: str) -> Truth:
    truth = _asked(client, name, question, picture, question)
    assert truth.answer == answer, f"the demo model answers {truth.answer!r}, not {answer!r}"
    return truth


def _asked(client: Client, name: str, question: str, *parts: Any) -> Truth:
    answer = client.generate([user(*parts)], GREEDY)
    return Truth(
        picture=name,
        question=question,
        answer=answer.text,
        prompt_tokens=answer.usage.prompt_token_count,
        image_tokens=answer.usage.image_token_count,
        completion_tokens=answer.usage.completion_token_count,
        logprobs=[one.logprob for one in answer.choices[0].logprobs],
    )
