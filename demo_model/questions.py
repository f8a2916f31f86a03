"""Question kinds, their wordings, and conversations of several turns over one to four pictures.

Every wording and every answer of the demo model is listed here. Answers are one word, but for
`describe` (a phrase) and `counting` (a list of numbers, a text-only task with a long answer).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from demo_model.pictures import COUNTS, Scene

MAX_PICTURES = 4
NO_PICTURE = -1
COUNTING_LIMIT = 50

WORDINGS: Mapping[str, tuple[str, ...]] = {
    "kind": (
        "What is in {the picture}?",
        "What does {the picture} show?",
        "What do you see in {the picture}?",
        "Does {the picture} show shapes, a digit or a word?",
    ),
    "colour": (
        "What colour is it{in the picture}?",
        "What color is it{in the picture}?",
        "What colour is the {thing}{in the picture}?",
        "What color is the {thing}{in the picture}?",
        "Which colour is the {thing}{in the picture}?",
        "Which color is the {thing}{in the picture}?",
        "What is the colour of the {thing}{in the picture}?",
        "What is the color of the {thing}{in the picture}?",
        "Name the colour of the {thing}{in the picture}.",
    ),
    "shape": (
        "What shape is it{in the picture}?",
        "What shape is this{in the picture}?",
        "Which shape is it{in the picture}?",
        "What shape is shown{in the picture}?",
        "Which shape is shown{in the picture}?",
        "What shape do you see{in the picture}?",
        "What shape is in {the picture}?",
        "Which shape is in {the picture}?",
        "What is the shape{in the picture}?",
        "Name the shape{in the picture}.",
    ),
    "count": (
        "How many shapes are there{in the picture}?",
        "How many {things} are there{in the picture}?",
        "How many shapes are in {the picture}?",
        "How many shapes do you see{in the picture}?",
        "How many shapes does {the picture} show?",
        "How many objects are there{in the picture}?",
        "How many are there{in the picture}?",
        "Count the shapes{in the picture}.",
    ),
    "position": (
        "Where is it{in the picture}?",
        "Where is the {thing}{in the picture}?",
        "Where do you see the {thing}{in the picture}?",
        "What is the position of the {thing}{in the picture}?",
        "Is the {thing} left, right, top, bottom or centre{in the picture}?",
    ),
    "digit": (
        "What digit is it{in the picture}?",
        "What digit is this{in the picture}?",
        "Which digit is it{in the picture}?",
        "What digit is shown{in the picture}?",
        "Which digit is shown{in the picture}?",
        "What digit is in {the picture}?",
        "Which digit is in {the picture}?",
        "What is the digit{in the picture}?",
        "What number is shown{in the picture}?",
        "What number is in {the picture}?",
        "Which digit do you see{in the picture}?",
        "Name the digit{in the picture}.",
    ),
    "word": (
        "What word is it{in the picture}?",
        "What word is this{in the picture}?",
        "Which word is it{in the picture}?",
        "What word is shown{in the picture}?",
        "Which word is shown{in the picture}?",
        "What word is written{in the picture}?",
        "Which word is written{in the picture}?",
        "What word is in {the picture}?",
        "Which word is in {the picture}?",
        "What is the word{in the picture}?",
        "What does it say{in the picture}?",
        "Read the word{in the picture}.",
    ),
    "describe": (
        "Describe {the picture}.",
        "Please describe {the picture}.",
        "Give a description of {the picture}.",
    ),
    "counting": (
        "Count to 50.",
        "Count from 1 to 50.",
        "Please count to 50.",
        "Say the numbers from 1 to 50.",
    ),
}
PICTURE_KINDS = tuple(kind for kind in WORDINGS if kind != "counting")
ORDINALS = ("first", "second", "third", "fourth")
ENDINGS = (" Answer with one word.", " Answer in one word.", " One word only.")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about pictures.",
    "You are a vision assistant. Answer with one word.",
    "Answer briefly.",
    "Be brief and exact. Look at the picture before you answer.",
)
NOUNS = {"shapes": "shape", "digit": "digit", "word": "word"}


@dataclass(frozen=True)
class Turn:
    """One question. `pictures` are those attached to this turn, by index in the conversation.

    `target` is the index of the picture asked about, or NO_PICTURE.
    """

    pictures: tuple[int, ...]
    picture_first: bool
    kind: str
    question: str
    answer: str
    target: int


@dataclass(frozen=True)
class Conversation:
    """`scenes` in the order in which the turns attach them; `system` is empty for none."""

    scenes: tuple[Scene, ...]
    system: str
    turns: tuple[Turn, ...]


def kinds_of(scene: Scene) -> tuple[str, ...]:
    """The question kinds that have an answer for this scene."""
    own = {"shapes": ("shape", "count"), "digit": ("digit",), "word": ("word",)}[scene.kind]
    where = ("position",) if scene.position else ()
    return ("kind", "colour", *own, *where, "describe")


def answer_of(scene: Scene, kind: str) -> str:
    """The right answer. Raises KeyError for a kind that the scene has no answer for."""
    if kind == "describe":
        return describe(scene)
    answers = {"kind": scene.kind, "colour": scene.colour}
    if scene.kind == "shapes":
        answers |= {"shape": scene.content, "count": scene.count}
    else:
        answers[scene.kind] = scene.content
    if scene.position:
        answers["position"] = scene.position
    return answers[kind]


def describe(scene: Scene) -> str:
    if scene.kind == "shapes":
        noun = scene.content if scene.count == COUNTS[0] else _plural(scene.content)
        return f"{scene.count} {scene.colour} {noun}"
    return f"the {scene.kind} {scene.content} in {scene.colour}"


def counting(limit: int) -> str:
    return " ".join(str(n) for n in range(1, limit + 1))


def ask(stream: random.Random, scene: Scene, kind: str, number: int | None) -> str:
    """Words a question of this kind. `number` (from 1) names one of several pictures."""
    wording = stream.choice(WORDINGS[kind])
    noun, inside = _reference(stream, number)
    thing = NOUNS[scene.kind]
    if thing == "shape" and (kind == "position" or stream.random() < 0.4):
        thing = stream.choice(("shape", "object", scene.content))
    if len(scene.placements) > 1 and "{thing}" in wording and stream.random() < 0.3:
        wording = wording.replace(" is the {thing}", " are the {thing}")
        thing = _plural(thing)
    text = wording.replace("{the picture}", noun).replace("{in the picture}", inside)
    text = text.replace("{things}", _plural(scene.content)).replace("{thing}", thing)
    return _restyle(stream, text, kind)


def _plural(noun: str) -> str:
    return noun + ("es" if noun == "cross" else "s")


def _reference(stream: random.Random, number: int | None) -> tuple[str, str]:
    if number is None:
        noun = stream.choice(("the picture", "this picture", "the image", "this image"))
        return noun, stream.choice(("", "", f" in {noun}"))
    picture = stream.choice(("picture", "picture", "image"))
    noun = stream.choice((f"the {ORDINALS[number - 1]} {picture}", f"{picture} {number}"))
    return noun, f" in {noun}"


def _restyle(stream: random.Random, text: str, kind: str) -> str:
    if stream.random() < 0.15:
        text = text[0].lower() + text[1:]
    if stream.random() < 0.1:
        text = text.rstrip("?.")
    elif kind != "describe" and stream.random() < 0.25:
        text += stream.choice(ENDINGS)
    return text


def counting_turn(stream: random.Random) -> Turn:
    question = stream.choice(WORDINGS["counting"])
    return Turn((), True, "counting", question, counting(COUNTING_LIMIT), NO_PICTURE)


def converse(
    stream: random.Random, scenes: Sequence[Scene], attach: Sequence[int], kinds: Sequence[str] = ()
) -> Conversation:
    """A conversation whose turn `i` attaches the next `attach[i]` scenes and asks one question.

    A question names its picture by number unless the last attached picture came alone. `kinds`
    limits what is asked. Raises ValueError if no picture of a turn can answer such a question.
    """
    turns: list[Turn] = []
    shown, alone = 0, False
    for count in attach:
        new = tuple(range(shown, shown + count))
        shown += count
        alone = count == 1 or (alone and count == 0)
        turns.append(_picture_turn(stream, scenes[:shown], new, alone, kinds))
    return Conversation(tuple(scenes[:shown]), _system(stream), tuple(turns))


def _picture_turn(
    stream: random.Random,
    shown: Sequence[Scene],
    new: tuple[int, ...],
    alone: bool,
    kinds: Sequence[str],
) -> Turn:
    unnamed = alone and (len(shown) == 1 or stream.random() < 0.5)
    choices = [len(shown) - 1] if unnamed else list(range(len(shown)))
    targets = [i for i in choices if _askable(shown[i], kinds)]
    if not targets:
        raise ValueError(f"no picture here answers {kinds}")
    target = stream.choice(targets)
    kind = stream.choice(_askable(shown[target], kinds))
    named = None if unnamed and stream.random() < 0.9 else target + 1
    question = ask(stream, shown[target], kind, named)
    answer = answer_of(shown[target], kind)
    return Turn(new, stream.random() < 0.75, kind, question, answer, target)


def _askable(scene: Scene, kinds: Sequence[str]) -> list[str]:
    return [kind for kind in kinds_of(scene) if not kinds or kind in kinds]


def _system(stream: random.Random) -> str:
    return stream.choice(SYSTEM_PROMPTS) if stream.random() < 0.25 else ""


def to_messages(conversation: Conversation, turn_count: int) -> list[dict[str, Any]]:
    """Chat messages up to the question of turn `turn_count`, earlier answers included.

    Picture parts are `{"type": "image"}`; the pictures are `scenes` in order.
    """
    messages: list[dict[str, Any]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for index, turn in enumerate(conversation.turns[:turn_count]):
        messages.append({"role": "user", "content": _parts(turn)})
        if index < turn_count - 1:
            messages.append({"role": "assistant", "content": turn.answer})
    return messages


def _parts(turn: Turn) -> str | list[dict[str, str]]:
    if not turn.pictures:
        return turn.question
    images = [{"type": "image"} for _ in turn.pictures]
    text = [{"type": "text", "text": turn.question}]
    return images + text if turn.picture_first else text + images
