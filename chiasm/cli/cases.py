"""The conversations that `chiasm compare` holds: one to four pictures, one to four turns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chiasm.cli.dialogue import Picture

# Over the shipped pictures, in the order of their names: circles, fish, seven, star.
SAMPLE_QUESTIONS = (
    "What colour is it?",
    "Describe the picture.",
    "What is in the picture?",
    "Where is it?",
)
SECOND_PICTURE = "What is in the second picture?"
LAST_PICTURE = "Describe the last picture."


@dataclass(frozen=True)
class Turn:
    """What the person shows and says at once, in order."""

    items: tuple[str | Picture, ...]


@dataclass(frozen=True)
class Case:
    """One conversation."""

    name: str
    turns: tuple[Turn, ...]


def cases(pictures: Sequence[Picture], questions: Sequence[str]) -> list[Case]:
    """The conversations over `pictures` (at least one), each question used where it fits.

    With fewer than four pictures some appear twice: equal pictures at two places are a case too.
    """
    shown = [pictures[place % len(pictures)] for place in range(4)]
    said = [questions[place % len(questions)] for place in range(4)]
    return [
        *_single(pictures, said),
        Case("one picture, three turns", _over_turns(shown[:1], said[:3])),
        Case("two pictures, one turn", (Turn((*shown[:2], SECOND_PICTURE)),)),
        Case("two pictures, text between", (Turn((shown[2], said[0], shown[3], said[1])),)),
        Case("three pictures, two turns", _three(shown, said)),
        Case("four pictures, one turn", (Turn((*shown, LAST_PICTURE)),)),
        Case("four pictures, four turns", _over_turns(shown, said)),
        Case("text before the picture", (Turn((said[0], shown[3])),)),
        Case("one picture twice", (Turn((shown[0], shown[0], said[0])),)),
    ]


def _single(pictures: Sequence[Picture], said: Sequence[str]) -> Iterator[Case]:
    for place, picture in enumerate(pictures[:4]):
        yield Case(picture.name, (Turn((picture, said[place])),))


def _over_turns(shown: Sequence[Picture], said: Sequence[str]) -> tuple[Turn, ...]:
    """A picture with each question, as long as there are pictures."""
    return tuple(Turn((*shown[place : place + 1], question)) for place, question in enumerate(said))


def _three(shown: Sequence[Picture], said: Sequence[str]) -> tuple[Turn, ...]:
    return (Turn((shown[1], said[0])), Turn((*shown[2:4], SECOND_PICTURE)))
