"""Large texts that leave a body before its JSON is parsed: nothing else about the body changes."""

import asyncio
import base64
import json
from typing import Any

from hypothesis import example, given, seed, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from gateway.openai import pulled

RUN, HALF = "A" * pulled.LARGE, "B" * (pulled.LARGE // 2)
PIECES = [
    *('"', '"', '"', "\\", ",", ":", "{", "}", "[", "]", " ", "\n", "é", "1", "=", "/", "\x01"),
    *(
        RUN,
        RUN,
        RUN,
        HALF,
        HALF + "\\/" + HALF,
        "data:image/png;base64,",
        "data:;base64,",
        "data:,",
    ),
    *(f'"{RUN}"', f'{{"a":"{RUN}"}}', f'["x","{RUN}",1]', f'"{HALF}{HALF}"', f'"\\"{RUN}"'),
]


def value_of(body: bytes | bytearray) -> Any:
    try:
        return from_json(body)
    except ValueError:
        return ValueError


def restored(value: Any, data: pulled.Data) -> Any:
    """`value` with the texts that its tickets stand for."""
    if isinstance(value, str):
        head, comma, last = value.rpartition(",")
        return head + comma + base64.b64encode(data[last]).decode() if last in data else value
    if isinstance(value, list):
        return [restored(inner, data) for inner in value]
    if isinstance(value, dict):
        return {restored(key, data): restored(inner, data) for key, inner in value.items()}
    return value


def check_same(text: str) -> None:
    body = bytearray(text.encode())
    before = bytes(body)
    got = asyncio.run(pulled.pull(body))
    assert bytes(body) == before
    assert restored(value_of(got.body), got.data) == value_of(before)


@seed(7)
@settings(max_examples=150, deadline=None, database=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8))
@example(pieces=['{"a":"b"', RUN, '"}'])
@example(pieces=['{"', RUN, '":1}'])
@example(pieces=['["x\\"', RUN, '"]'])
@example(pieces=['["x\\\\"', RUN, '"]'])
@example(pieces=['["data:image/png;base64,', RUN, '"]'])
@example(pieces=['["', RUN, '","', HALF, RUN, '"]'])
def test_the_json_means_the_same_with_and_without_its_large_texts(pieces: list[str]) -> None:
    check_same("".join(pieces))


async def test_sound_base64_of_a_large_size_is_pulled_and_a_smaller_one_is_not() -> None:
    for length, count in ((pulled.LARGE - 4, 0), (pulled.LARGE, 1), (5 * pulled.LARGE, 1)):
        for shift in (0, 1, pulled.LARGE // 4, pulled.LARGE // 2 - 1):
            body = json.dumps({"pad": " " * shift, "x": "A" * length, "y": "A" * length})
            got = await pulled.pull(bytearray(body.encode()))
            assert len(got.data) == 2 * count


async def test_a_ticket_outside_pictures_is_not_in_place() -> None:
    for request, placed in (
        ({"messages": [{"content": [{"type": "image_embeds", "image_embeds": RUN}]}]}, True),
        ({"messages": [{"content": [{"type": "text", "text": RUN}]}]}, False),
        ({"messages": [{"content": RUN}]}, False),
        ({"messages": [{"content": [{"image_embeds": {"image_grid_thw": RUN}}]}]}, False),
        ({"messages": [{"content": [{"image_embeds": RUN}]}], "user": RUN}, False),
        ({"messages": RUN}, False),
        ([RUN], False),
    ):
        got = await pulled.pull(bytearray(json.dumps(request).encode()))
        assert got.data
        assert pulled.all_placed(json.loads(got.body), got.data) is placed


async def test_no_two_requests_have_the_same_tickets() -> None:
    body = bytearray(f'["{RUN}"]'.encode())
    first, second = await pulled.pull(body), await pulled.pull(body)
    assert first.data.keys().isdisjoint(second.data)
