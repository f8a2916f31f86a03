"""Answers in a form, asked for over HTTP: each parses and validates, streamed or whole."""

import asyncio
import json
import re
from typing import Any

import httpx
import jsonschema
import pytest

from chiasm.conversation import user
from tests.system.processes import SAMPLES
from tests.system.three import Json, Three

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue", "yellow"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 12},
        "sure": {"type": "boolean"},
        "places": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]{1,6}$"},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["colour", "count", "places"],
    "additionalProperties": False,
}
PATTERN = r"[A-Z][a-z]{2,5}-[0-9]{3}"
CHOICES = ["a red circle", "a blue square", 'a "quoted" star']
# As OpenAI's clients ask, and by vLLM's newer and older names.
JSON_FORMS: dict[str, Json] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "seen", "schema": SCHEMA, "strict": True},
        }
    },
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "guided_json": {"guided_json": json.dumps(SCHEMA)},
}
WAYS: dict[str, Json] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.5, "seed": 7},
    "penalised": {"temperature": 1.0, "seed": 8, "presence_penalty": 1.0, "logprobs": True},
}


def _body(demo: Three, form: Json, **more: Any) -> Json:
    picture = sorted(SAMPLES.glob("*.png"))[0].read_bytes()
    turns = [user(picture, "What do you see?")]
    return demo.body(turns, **{"max_tokens": 200, **form, **more})


async def _whole(http: httpx.AsyncClient, body: Json) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    return [(one["message"]["content"], one["finish_reason"]) for one in choices]


async def _streamed(http: httpx.AsyncClient, body: Json) -> list[tuple[str, str]]:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    lines = []
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as came:
        assert came.status_code == 200
        lines = [line.removeprefix("data: ") async for line in came.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    for choice in (one for line in lines[:-1] for one in json.loads(line)["choices"]):
        number = choice["index"]
        texts[number] = texts.get(number, "") + (choice["delta"].get("content") or "")
        if choice["finish_reason"]:
            reasons[number] = choice["finish_reason"]
    assert len(lines) > 3
    return [(texts[number], reasons[number]) for number in sorted(texts)]


def _check(text: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("form", JSON_FORMS.values(), ids=JSON_FORMS.keys())
async def test_an_answer_of_a_schema_validates_and_a_stream_gives_the_same(
    demo: Three, form: Json, way: Json
) -> None:
    body = _body(demo, form, **way)
    async with demo.http() as http:
        [(text, reason)] = await _whole(http, body)
        assert reason == "stop"
        _check(text)
        assert await _streamed(http, body) == [(text, reason)]


async def test_many_at_once_each_keep_to_their_own_form(demo: Three) -> None:
    forms = [
        JSON_FORMS["json_schema"],
        {"structured_outputs": {"regex": PATTERN}},
        {"structured_outputs": {"choice": CHOICES}},
        {"response_format": {"type": "json_object"}},
        {},
    ]
    bodies = [_body(demo, form, temperature=1.0, seed=seed) for seed in range(4) for form in forms]
    async with demo.http() as http:
        alone = [await _whole(http, body) for body in bodies[: len(forms)]]
        ways = [_streamed if number % 2 else _whole for number in range(len(bodies))]
        answers = await asyncio.gather(
            *(way(http, body) for way, body in zip(ways, bodies, strict=True))
        )
    # What each says beside the others is what it says alone.
    assert answers[: len(forms)] == alone
    for place in range(0, len(bodies), len(forms)):
        [[schema], [regex], [choice], [anything], [free]] = answers[place : place + len(forms)]
        assert schema[1] == regex[1] == choice[1] == "stop"
        _check(schema[0])
        assert re.fullmatch(PATTERN, regex[0])
        assert choice[0] in CHOICES
        assert anything[0].startswith("{")
        if anything[1] == "stop":
            assert isinstance(json.loads(anything[0]), dict)
        with pytest.raises(json.JSONDecodeError):
            json.loads(free[0])


async def test_all_choices_of_a_request_keep_to_its_form(demo: Three) -> None:
    body = _body(demo, JSON_FORMS["json_schema"], temperature=1.5, seed=3, n=4)
    async with demo.http() as http:
        answers = await _whole(http, body)
        assert await _streamed(http, body) == answers
    assert len({text for text, _ in answers}) > 1
    for text, reason in answers:
        assert reason == "stop"
        _check(text)


async def test_an_answer_that_is_cut_says_so(demo: Three) -> None:
    body = _body(demo, JSON_FORMS["json_schema"], temperature=0, max_tokens=4)
    async with demo.http() as http:
        [(text, reason)] = await _whole(http, body)
    assert reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


async def test_a_form_that_cannot_be_kept_to_is_refused_by_name_and_others_go_on(
    demo: Three,
) -> None:
    bad: Json = {"type": "object", "properties": {"v": {"type": "strnig"}}}
    async with demo.http() as http:
        beside = asyncio.create_task(_whole(http, _body(demo, JSON_FORMS["json_schema"])))
        for kind, value in [("json", bad), ("regex", "("), ("grammar", "start: nothing")]:
            body = _body(demo, {"structured_outputs": {kind: value}})
            told = await http.post("/v1/chat/completions", json=body)
            assert told.status_code == 400
            assert told.json()["error"]["param"].startswith(f"structured_outputs.{kind}")
        [(text, _)] = await beside
    _check(text)
