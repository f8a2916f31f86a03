"""What each client's tests ask, and what the demo model answers; see `tests/clients/facts.py`."""

import json
import os
import time
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

SETTLE_SECONDS: Final = 10.0
_CALLS: Final = "chiasm_gateway_requests_total"
COLOURS: Final = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]
COLOUR_QUESTION: Final = "What colour is it?"
COLOUR: Final = {"star": "orange", "seven": "green"}
# What a tool gives back: the model, which knows no tools, answers it as a question.
RESULT: Final = COLOUR_QUESTION
ANSWER_TO_RESULT: Final = COLOUR["star"]
NOT_A_PICTURE: Final = "data:image/png;base64,SGVsbG8gV29ybGQ="
# Calls of it end soon, whatever a model writes: all of its values are short.
PAINT_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "bright": {"type": "boolean"}},
    "required": ["colour", "bright"],
    "additionalProperties": False,
}
PAINT: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paints the wall.",
        "parameters": PAINT_PARAMETERS,
    },
}
WIPE: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "wipe",
        "description": "Wipes the wall.",
        "parameters": {
            "type": "object",
            "properties": {"dry": {"type": "boolean"}},
            "required": ["dry"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Truth:
    """One question, the model's answer to it by gRPC, and what it took."""

    picture: str
    question: str
    answer: str
    prompt_tokens: int
    image_tokens: int
    completion_tokens: int
    logprobs: list[float]


@dataclass(frozen=True)
class Facts:
    """The system, and truths about it."""

    url: str
    load_url: str
    model: str
    context_length: int
    pictures: dict[str, str]
    counting: Truth
    sights: list[Truth]

    @property
    def too_long(self) -> str:
        """A text of more tokens than the context has."""
        return "word " * self.context_length

    def sight(self, picture: str) -> Truth:
        """The first question about a picture."""
        return next(one for one in self.sights if one.picture == picture)


@cache
def facts() -> Facts:
    """As the runner gathered them."""
    told = json.loads(Path(os.environ["CHIASM_CLIENTS_FACTS"]).read_text(encoding="utf-8"))
    counting = Truth(**told.pop("counting"))
    sights = [Truth(**one) for one in told.pop("sights")]
    return Facts(counting=counting, sights=sights, **told)


def text_message(text: str) -> list[Any]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def picture_message(url: str, text: str) -> list[Any]:
    """A conversation of one question about a picture."""
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


def check_painting(arguments: str | dict[str, Any], colour: str = "orange") -> None:
    """Holds a call of `paint` against its schema, and that the model saw the star's colour."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(given) == {"colour", "bright"}
    assert given["colour"] == colour
    assert isinstance(given["bright"], bool)


def load() -> dict[str, int]:
    """What the LLM service has in hand now."""
    with urllib.request.urlopen(facts().load_url, timeout=10) as told:
        read: dict[str, int] = json.load(told)
        return read


def calls_left() -> int:
    """How many calls the gateway has seen its clients leave."""
    with urllib.request.urlopen(f"{facts().url.removesuffix('/v1')}/metrics", timeout=10) as told:
        lines = told.read().decode().splitlines()
    left = [line for line in lines if line.startswith(_CALLS) and 'reason="CANCELLED"' in line]
    return sum(int(float(line.rpartition(" ")[2])) for line in left)


def check_left(before: int) -> None:
    """Holds that one more call was left than `before`, and that nothing is generated for it."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (now := (calls_left(), load())) != (before + 1, {"active": 0, "running": 0}):
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
