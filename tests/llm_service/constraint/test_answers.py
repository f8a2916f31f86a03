"""Answers of the demo model under constraints, over a real socket."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from chiasm import forms
from chiasm.client import Answer, AsyncClient, Delta
from chiasm.conversation import Sampling, user
from chiasm.errors import ChiasmError, Reason
from chiasm.forms import Form
from llm_service.app import Running, running
from llm_service.settings import LlmSettings
from tests.llm_service.constraint.schemas import SCHEMAS, UNBOUNDED, check

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHECKPOINT = Path(__file__).parents[3] / "demo_model" / "checkpoint"
ASK = [user("What do you see? Tell me more of it.")]
FREE = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
DATE = forms.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Running]:
    settings: dict[str, Any] = {
        "model": CHECKPOINT,
        "port": 0,
        "vision": "none",
        # 40 blocks: answers that run together displace each other.
        "kv_bytes": 40 * 16 * 3 * 2 * 3 * 64 * 4,
        "torch_threads": 1,
        "drain_seconds": 0.05,
        "grace_seconds": 5.0,
    }
    async with running(LlmSettings(**settings)) as service:
        yield service


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(service: Running) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(llm=f"127.0.0.1:{service.port}", timeout=100) as client:
        yield client


def drawn(seed: int, max_tokens: int = 400, **more: Any) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, max_tokens=max_tokens, **more)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
async def test_answers_of_a_schema_validate_greedy_and_drawn(
    client: AsyncClient, schema: Any
) -> None:
    ways = [Sampling(temperature=0, max_tokens=200), *(drawn(seed, 200) for seed in range(4))]
    form = forms.json_schema(schema)
    answers = await asyncio.gather(*(client.generate(ASK, way, form=form) for way in ways))
    ended = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert len(ended) == len(answers) or schema in UNBOUNDED
    for text in ended:
        check(text, schema)


async def test_a_stream_gives_the_text_of_the_whole_answer(client: AsyncClient) -> None:
    form = forms.json_schema(SCHEMAS["some required"])
    whole = await client.generate(ASK, drawn(3), form=form)
    events = [event async for event in client.stream(ASK, drawn(3), form=form)]
    assert isinstance(events[-1], Answer)
    assert "".join(one.text for one in events if isinstance(one, Delta)) == whole.text
    assert events[-1].text == whole.text


@pytest.mark.parametrize("seed", range(6))
async def test_json_object_gives_an_object_or_says_that_it_was_cut(
    client: AsyncClient, seed: int
) -> None:
    answer = await client.generate(ASK, drawn(seed, 120), form=forms.json_object())
    assert answer.text.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 120)


async def test_a_cut_answer_ends_with_length(client: AsyncClient) -> None:
    form = forms.json_schema(SCHEMAS["nested objects"])
    answer = await client.generate(ASK, drawn(0, 3), form=form)
    assert answer.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text)


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-z]{2,5}", "(yes|no)!?", "é+[^a]", r"\w{4}\.txt"])
async def test_answers_match_a_regex_from_end_to_end(client: AsyncClient, pattern: str) -> None:
    for seed in range(4):
        answer = await client.generate(ASK, drawn(seed, 60), form=forms.regex(pattern))
        if answer.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.text)
        else:
            assert answer.text.startswith("é")


async def test_an_answer_is_one_of_the_choices_and_each_can_come(client: AsyncClient) -> None:
    texts = ("red", "green", "redder", 'a "quoted"\n\\text', "日本😀")
    said = {
        (await client.generate(ASK, drawn(seed), form=forms.choice(*texts))).text
        for seed in range(12)
    }
    assert said <= {*texts}
    assert len(said) > 1
    only = await client.generate(ASK, drawn(0), form=forms.choice(texts[-1]))
    assert only.text == texts[-1]


async def test_answers_keep_a_grammar(client: AsyncClient) -> None:
    form = forms.grammar(
        """
        start: sum "=" NUMBER
        sum: NUMBER | "(" sum "+" sum ")"
        NUMBER: /[0-9]{1,3}/
        """
    )
    for seed in range(6):
        answer = await client.generate(ASK, drawn(seed, 200), form=form)
        assert answer.finish_reason == "stop"
        sides = answer.text.split("=")
        assert len(sides) == 2
        assert re.fullmatch("[0-9]{1,3}", sides[1])
        assert sides[0].count("(") == sides[0].count(")") == sides[0].count("+")


async def test_each_choice_of_an_answer_keeps_the_form_by_itself(client: AsyncClient) -> None:
    schema = SCHEMAS["anyOf"]
    many = await client.generate(ASK, drawn(5, choices=4), form=forms.json_schema(schema))
    alone = [
        await client.generate(ASK, drawn(5 + choice), form=forms.json_schema(schema))
        for choice in range(4)
    ]
    assert [one.text for one in many.choices] == [one.text for one in alone]
    for choice in many.choices:
        check(choice.text, schema)


async def test_stop_texts_and_token_limits_still_end_an_answer(client: AsyncClient) -> None:
    answer = await client.generate(ASK, drawn(1, stop=("-",)), form=DATE)
    assert re.fullmatch("[0-9]{4}", answer.text)
    assert answer.finish_reason == "stop"


async def test_the_form_outweighs_biases_and_a_least_number_of_tokens(client: AsyncClient) -> None:
    wanted = drawn(2, min_tokens=50, logit_bias=dict.fromkeys(range(100, 200), 100.0))
    answer = await client.generate(ASK, wanted, form=DATE)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", answer.text)


async def test_ignoring_the_end_goes_on_for_as_long_as_the_form_lets_it(
    client: AsyncClient,
) -> None:
    wanted = drawn(2, 30, ignore_eos=True)
    endless = await client.generate(ASK, wanted, form=forms.regex("[a-c]*"))
    assert (endless.finish_reason, len(endless.token_ids)) == ("length", 30)
    bounded = await client.generate(ASK, wanted, form=forms.regex("[a-c]{0,7}"))
    assert re.fullmatch("[a-c]{7}", bounded.text)


async def test_answers_that_displace_each_other_are_those_that_ran_alone(
    client: AsyncClient, service: Running
) -> None:
    form = forms.regex("[a-z ]+")
    ways = [drawn(seed, 160, ignore_eos=True) for seed in range(8)]
    alone = [(await client.generate(ASK, way, form=form)).text for way in ways]
    before = service.engine.stats().preempted_total
    together = await asyncio.gather(*(client.generate(ASK, way, form=form) for way in ways))
    assert service.engine.stats().preempted_total > before
    assert [answer.text for answer in together] == alone


async def test_a_free_answer_beside_constrained_ones_is_what_it_is_alone(
    client: AsyncClient,
) -> None:
    alone = await client.generate(ASK, FREE)
    calls = [client.generate(ASK, drawn(seed, 60), form=DATE) for seed in range(6)]
    beside, *others = await asyncio.gather(client.generate(ASK, FREE), *calls)
    assert beside.token_ids == alone.token_ids
    assert all(re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", one.text) for one in others)


@pytest.mark.parametrize(
    ("form", "reason", "field", "said"),
    [
        (forms.json_schema({"not": {}}), Reason.UNSUPPORTED, "json_schema", "not cannot"),
        (forms.json_schema({"type": "strin"}), Reason.REQUEST_INVALID, "json_schema", "strin"),
        (Form(json_schema="{"), Reason.REQUEST_INVALID, "json_schema", "JSON"),
        (forms.regex("(a"), Reason.REQUEST_INVALID, "regex", "unclosed group"),
        (forms.regex("a(?=b)"), Reason.UNSUPPORTED, "regex", "look-around"),
        (forms.grammar("start: x"), Reason.REQUEST_INVALID, "grammar", "x"),
        (forms.choice(), Reason.REQUEST_INVALID, "choice.choices", "at least one"),
        (Form(), Reason.REQUEST_INVALID, None, "one of"),
    ],
)  # fmt: skip
async def test_a_bad_form_is_that_requests_error_while_a_stream_runs_on(
    client: AsyncClient, form: Form, reason: Reason, field: str | None, said: str
) -> None:
    alone = await client.generate(ASK, FREE)
    stream = asyncio.create_task(client.generate(ASK, FREE))
    with pytest.raises(ChiasmError) as caught:
        await client.generate(ASK, drawn(0), form=form)
    assert (await stream).text == alone.text
    assert caught.value.reason is reason
    assert caught.value.field == (f"constraint.{field}" if field else "constraint")
    assert said in caught.value.message


async def test_answers_of_random_schemas_validate(client: AsyncClient) -> None:
    dice = random.Random(11)
    schemas = [_random_schema(dice, 3) for _ in range(12)]
    calls = [
        client.generate(ASK, drawn(seed), form=forms.json_schema(schema))
        for seed, schema in enumerate(schemas)
    ]
    results = await asyncio.gather(*calls)
    for answer, schema in zip(results, schemas, strict=True):
        assert answer.finish_reason == "stop"
        check(answer.text, schema)


def _random_schema(dice: random.Random, depth: int) -> dict[str, Any]:
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"enum": [dice.randrange(9), "x", None]},
        {"type": "integer", "minimum": dice.randrange(5), "maximum": 5 + dice.randrange(40)},
        {"type": "string", "minLength": dice.randrange(3), "maxLength": 3 + dice.randrange(3)},
        {"type": "string", "pattern": f"^[a-f]{{{dice.randrange(1, 4)}}}$"},
    ]
    if depth == 0:
        return dice.choice(leaves)
    inner = [_random_schema(dice, depth - 1) for _ in range(dice.randrange(1, 4))]
    names = [f"k{number}" for number in range(len(inner))]
    return dice.choice(
        [
            *leaves,
            {"anyOf": inner},
            {"type": "array", "items": inner[0], "minItems": 1, "maxItems": 2},
            {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)},
            {
                "type": "object",
                "properties": dict(zip(names, inner, strict=True)),
                "required": dice.sample(names, dice.randrange(len(names) + 1)),
                "additionalProperties": False,
            },
        ]
    )
