"""A conversation goes on: what is known is not computed again, and nothing else is taken for it."""

from typing import Any

import httpx
import pytest

from chiasm.conversation import Message, Sampling, assistant, user
from tests.system.three import CONTAINERS, Json, Three, asked, noise, with_embeddings

pytestmark = pytest.mark.system

LENGTH = 24
BLOCK = 16
GREEDY = Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True)
SAME: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True}


async def _usage(http: httpx.AsyncClient, body: Json) -> Json:
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    usage: Json = response.json()["usage"]
    return usage


def _turns(first: int, second: int) -> list[Message]:
    """Two turns, each with a picture of its own; no other `first` begins alike."""
    return [
        user(f"{first}: look closely at this picture: ", noise(first), "what is it, then?"),
        assistant("A picture of nothing in particular, with much noise in it."),
        user(noise(second), "and this?"),
    ]


async def test_the_second_turn_says_that_the_first_was_known(tiny: Three) -> None:
    turns = _turns(300, 301)
    async with tiny.client() as client, tiny.http() as http:
        first = await client.generate(turns[:1], GREEDY)
        assert first.usage.cached_token_count == 0
        second = await client.generate(turns, GREEDY)
        known = second.usage.cached_token_count
        # The first prompt's full blocks, but not the one where the answers part.
        assert known == first.usage.prompt_token_count // BLOCK * BLOCK > 0
        usage = await _usage(http, tiny.body(turns, **SAME))
    assert usage["prompt_tokens"] == second.usage.prompt_token_count
    # Now the whole prompt is known but for its last block's tokens.
    expected = (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
    details = usage["prompt_tokens_details"]
    assert (details["cached_tokens"], details["image_tokens"]) == (expected, 8)
    assert usage["total_tokens"] == usage["prompt_tokens"] + LENGTH


async def test_the_answer_follows_the_picture_whatever_was_asked_before(tiny: Three) -> None:
    async with tiny.http() as http:
        bodies = [tiny.body(_turns(302, last), **SAME) for last in (303, 304, 303)]
        answers = [await asked(http, body) for body in bodies]
        usages = [await _usage(http, body) for body in bodies]
    assert answers[0] == answers[2] != answers[1]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in usages)


async def test_another_tenant_and_another_salt_know_nothing(tiny: Three) -> None:
    turns = _turns(305, 306)
    async with tiny.client() as client, tiny.client(tenant="other") as other, tiny.http() as http:
        mine = [await client.generate(turns, GREEDY) for _ in range(2)]
        theirs = await other.generate(turns, GREEDY)
        salted = [await _usage(http, tiny.body(turns, cache_salt="s", **SAME)) for _ in range(2)]
    known = [answer.usage.cached_token_count for answer in (*mine, theirs)]
    known += [usage["prompt_tokens_details"]["cached_tokens"] for usage in salted]
    assert known == [0, known[1], 0, 0, known[1]]
    assert known[1] > 0
    assert theirs.text == mine[0].text == mine[1].text


async def test_equal_embeddings_are_known_again_whichever_way_they_come(tiny: Three) -> None:
    raw = _turns(307, 308)
    async with tiny.client() as client, tiny.http() as http:
        pictures = [part for turn in raw for part in turn.parts if isinstance(part, bytes)]
        embedded = with_embeddings(raw, {one: await client.encode(one) for one in pictures})
        first = await client.generate(embedded, GREEDY)
        again = await client.generate(embedded, GREEDY)
        longer = [*embedded, assistant(again.text), user("and so?")]
        usages = [await _usage(http, tiny.body(embedded, one, **SAME)) for one in CONTAINERS]
        last = await client.generate(longer, GREEDY)
    assert first.text == again.text
    known = again.usage.cached_token_count
    assert 0 == first.usage.cached_token_count < known <= last.usage.cached_token_count
    assert len({usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[1:]}) == 1
