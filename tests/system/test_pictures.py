"""Pictures reach the answer whole, in order and alike, whichever way they came."""

from itertools import permutations
from typing import Any

import pytest

from chiasm.client import AsyncClient
from chiasm.conversation import Embedding, Message, Sampling, assistant, system, user
from tests.system.processes import SAMPLES
from tests.system.three import CONTAINERS, Three, asked, noise, with_embeddings

pytestmark = pytest.mark.system

LENGTH = 24
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SAME: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True}
SHORT = Sampling(temperature=0)
COLOUR_QUESTION = "What colour is it?"
STAR, SEVEN = (SAMPLES / "star.png").read_bytes(), (SAMPLES / "seven.png").read_bytes()
# As `demo_model.samples` drew them.
COLOUR = {STAR: "orange", SEVEN: "green"}


def conversation(pictures: list[bytes]) -> list[Message]:
    """Several turns over all of `pictures`, the first in a turn of its own."""
    rest = pictures[1:]
    return [
        system("Answer briefly."),
        user("Look: ", pictures[0], "what is it?"),
        assistant("A picture."),
        user(*rest[:1], "and these?", *rest[1:]) if rest else user("are you sure?"),
    ]


async def encoded(client: AsyncClient, pictures: list[bytes]) -> dict[bytes, Embedding]:
    return {picture: await client.encode(picture) for picture in pictures}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_every_way_of_sending_pictures_gives_one_answer(tiny: Three, count: int) -> None:
    pictures = [noise(seed) for seed in range(10 * count, 10 * count + count)]
    raw = conversation(pictures)
    async with tiny.client() as client, tiny.http() as http:
        embedded = with_embeddings(raw, await encoded(client, pictures))
        expected = await client.generate(raw, GREEDY)
        assert (await client.generate(embedded, GREEDY)).token_ids == expected.token_ids
        assert len(expected.token_ids) == LENGTH
        assert await asked(http, tiny.body(raw, **SAME)) == expected.text
        for container in CONTAINERS:
            assert await asked(http, tiny.body(embedded, container, **SAME)) == expected.text
        # Another last picture changes the answer, or the equalities above would prove nothing.
        other = conversation([*pictures[:-1], noise(1000)])
        assert (await client.generate(other, GREEDY)).token_ids != expected.token_ids


async def test_one_picture_raw_and_one_embedded_answer_as_two_raw_in_either_order(
    tiny: Three,
) -> None:
    one, other = noise(70), noise(71)
    answers = set()
    async with tiny.client() as client, tiny.http() as http:
        embedding = await encoded(client, [one, other])
        for first, second in permutations([one, other]):
            raw = conversation([first, second])
            expected = await client.generate(raw, GREEDY)
            answers.add(expected.token_ids)
            for sent in (first, second):
                mixed = with_embeddings(raw, {sent: embedding[sent]})
                assert (await client.generate(mixed, GREEDY)).token_ids == expected.token_ids
                for container in CONTAINERS:
                    body = tiny.body(mixed, container, **SAME)
                    assert await asked(http, body) == expected.text
    assert len(answers) == 2


async def test_swapping_two_embeddings_swaps_the_answers_of_their_turns(demo: Three) -> None:
    async with demo.client() as client:
        embedding = await encoded(client, [STAR, SEVEN])
        for first, second in permutations([STAR, SEVEN]):
            turns = [user(embedding[first], COLOUR_QUESTION)]
            assert (await client.generate(turns, SHORT)).text == COLOUR[first]
            turns += [assistant(COLOUR[first]), user(embedding[second], COLOUR_QUESTION)]
            assert (await client.generate(turns, SHORT)).text == COLOUR[second]


async def test_swapping_two_embeddings_of_one_message_swaps_the_answers(demo: Three) -> None:
    async with demo.client() as client, demo.http() as http:
        embedding = await encoded(client, [STAR, SEVEN])
        for first, second in permutations([STAR, SEVEN]):
            for ordinal, meant in (("first", first), ("second", second)):
                question = f"What colour is it in the {ordinal} picture?"
                turns = [user(embedding[first], embedding[second], question)]
                assert (await client.generate(turns, SHORT)).text == COLOUR[meant]
                for container in CONTAINERS:
                    assert await asked(http, demo.body(turns, container)) == COLOUR[meant]
