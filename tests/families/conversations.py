"""Conversations to compare answers over: pictures of mixed sizes, text between, several turns."""

import random

import PIL.Image

from tests.families.oracle import Said

_WORDS = ("a red star", "left or right?", "Compare", "count them:", "now this", "é ok", "and\nnext")


def conversations(count: int = 6, seed: int = 0) -> list[list[Said]]:
    """`count` conversations; together they have every number of pictures from 0 to 8."""
    draw = random.Random(seed)
    pictured = [1, 2, 8, 0, 3, 5, 4, 6, 7]
    return [_conversation(draw, pictured[number % len(pictured)]) for number in range(count)]


def picture(draw: random.Random) -> PIL.Image.Image:
    """Coarse random colours, of 20 to 200 pixels a side."""
    size = (draw.randint(20, 200), draw.randint(20, 200))
    small = PIL.Image.new("RGB", (4, 4))
    small.putdata([tuple(draw.randrange(256) for _ in range(3)) for _ in range(16)])
    return small.resize(size, PIL.Image.Resampling.NEAREST)


def _conversation(draw: random.Random, pictures: int) -> list[Said]:
    turns: list[Said] = []
    while True:
        here = draw.randint(min(1, pictures), min(3, pictures))
        pictures -= here
        turns.append(("user", _parts(draw, here)))
        if not pictures:
            return turns
        turns.append(("assistant", (draw.choice(_WORDS),)))


def _parts(draw: random.Random, pictures: int) -> tuple[str | PIL.Image.Image, ...]:
    parts: list[str | PIL.Image.Image] = []
    for _ in range(pictures):
        if draw.random() < 0.7:
            parts.append(draw.choice(_WORDS))
        parts.append(picture(draw))
    return (*parts, draw.choice(_WORDS))
