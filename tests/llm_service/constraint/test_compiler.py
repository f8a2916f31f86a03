"""What may be asked for, and how it is bounded."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from chiasm import forms
from chiasm.errors import ChiasmError, Reason
from chiasm.forms import Form
from llm_service.constraint.compiler import Compiler
from llm_service.constraint.limits import ConstraintLimits, MaskBudget
from llm_service.constraint.matcher import ConstraintBroken, GrammarConstraint, Vocabulary

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = Path(__file__).parents[3] / "demo_model" / "checkpoint" / "tokenizer.json"
EOS = 2
SPECIAL = range(8)
# More rows than the tokenizer has tokens, as many heads do.
SIZE = 700
LIMITS = ConstraintLimits(compile_seconds=4.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary.of(tokenizer.to_str(), tokenizer.get_vocab_size(), SIZE, (EOS,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler(vocabulary: Vocabulary) -> AsyncIterator[Compiler]:
    compiler = Compiler(vocabulary, LIMITS)
    yield compiler
    await compiler.close()


async def refusal(compiler: Compiler, form: Form) -> ChiasmError:
    with pytest.raises(ChiasmError) as caught:
        await compiler.compile(form)
    return caught.value


def write(constraint: GrammarConstraint, text: str, tokenizer: Tokenizer) -> None:
    """Advances by `text`, each of its tokens allowed when it comes."""
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        assert constraint.allowed()[token]
        constraint.advance(token)


def nested(depth: int) -> str:
    return '{"allOf":[' * depth + "{}" + "]}" * depth


def chained(rules: int) -> str:
    """Each rule inside the one before: as deep as it is long."""
    middle = "\n".join(f'r{number}:r{number + 1}|"b"' for number in range(rules))
    return f'start: r0\n{middle}\nr{rules}: "z"'


UNENFORCED: dict[str, Any] = {
    "not": {"not": {"type": "null"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "null"}},
    "if": {"if": {"type": "null"}, "then": {"type": "null"}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "nullable": {"type": "string", "nullable": True},
    "minProperties": {"type": "object", "minProperties": 3},
    "items": {"type": "array", "items": [{"type": "null"}]},
    "$ref": {"$ref": "https://example.com/schema.json"},
    "banana": {"type": "string", "format": "banana"},
    "oneOf": {"oneOf": [{"minimum": 3}, {"maximum": 5}]},
    "look-around": {"type": "string", "pattern": "^(?=a)b$"},
}
INVALID: dict[str, str] = {
    "no JSON": "{",
    "two values": "{} {}",
    "infinite": '{"minimum": Infinity}',
    "half a character": '{"const": "\\ud800"}',
    "a list": "[]",
    "false": "false",
    "too deep to parse": "[" * 60_000,
    "deeper than the limit": nested(40),
    "no schema inside": '{"properties": {"a": 3}}',
    "unknown type": '{"type": "strin"}',
    "bad bound": '{"minimum": "3"}',
    "old bound": '{"minimum": 3, "exclusiveMinimum": true}',
    "bad pattern": '{"type": "string", "pattern": "["}',
    "nothing fits": '{"type": "integer", "minimum": 5, "maximum": 3}',
    "itself": '{"$ref": "#"}',
}


@pytest.mark.parametrize(("name", "schema"), UNENFORCED.items(), ids=UNENFORCED.keys())
async def test_what_cannot_be_enforced_is_refused_by_name_with_its_place(
    compiler: Compiler, name: str, schema: Any
) -> None:
    wrapped = {"type": "object", "properties": {"here": schema}, "required": ["here"]}
    told = await refusal(compiler, forms.json_schema(wrapped))
    assert (told.reason, told.field) == (Reason.UNSUPPORTED, "constraint.json_schema")
    assert name in told.message


@pytest.mark.parametrize("schema", INVALID.values(), ids=INVALID.keys())
async def test_an_invalid_schema_is_the_callers_error(compiler: Compiler, schema: str) -> None:
    told = await refusal(compiler, Form(json_schema=schema))
    assert (told.reason, told.field) == (Reason.REQUEST_INVALID, "constraint.json_schema")
    assert len(told.message) < 400
    assert told.message.isprintable()


@pytest.mark.parametrize(
    "extra",
    [
        {"title": "A", "description": "b", "examples": [1], "default": 2, "deprecated": True},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://a.b/c"},
        {"x-anything": 1, "banana": {"not": {}}, "discriminator": {"propertyName": "v"}},
        {"uniqueItems": False, "nullable": False},
        {"x-guidance": {"lenient": True, "whitespace_flexible": True}},
    ],
)
async def test_what_asserts_nothing_is_taken(
    compiler: Compiler, tokenizer: Tokenizer, extra: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"v": {"const": 1}}, "required": ["v"]} | extra
    write(await compiler.compile(forms.json_schema(schema)), '{"v":1}', tokenizer)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: <|user|>",
        "start: <[5]>",
        'start: "a" <image>',
        'start: %json {"not": {}}',
        '%llguidance {"no_forcing": true}\nstart: "a"',
        'root ::= "a"',
        'start: a\na[temperature=0.5]: "a"',
    ],
)
async def test_a_grammar_of_more_than_text_is_refused(compiler: Compiler, grammar: str) -> None:
    told = await refusal(compiler, forms.grammar(grammar))
    assert (told.reason, told.field) == (Reason.UNSUPPORTED, "constraint.grammar")


async def test_signs_inside_texts_and_comments_of_a_grammar_are_text(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    grammar = 'start: "<a>" A // <b> %json\nA: /<[%]/\n%ignore " "'
    write(await compiler.compile(forms.grammar(grammar)), "<a><%", tokenizer)


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (Form(json_object=False), "json_object"),
        (forms.regex(""), "regex"),
        (forms.regex("()"), "regex"),
        (forms.grammar('start: ""'), "grammar"),
        (forms.grammar("start: start"), "grammar"),
        (forms.choice("a", ""), "choice.choices[1]"),
        (forms.choice(*map(str, range(1025))), "choice.choices"),
        (forms.choice("x" * 40_000, "y" * 40_000), "choice.choices"),
        (forms.regex("x" * 70_000), "regex"),
        (forms.grammar("x" * 70_000), "grammar"),
        (forms.json_schema({"description": "é" * 70_000}), "json_schema"),
    ],
)
async def test_sizes_and_empty_forms_are_bounded(
    compiler: Compiler, form: Form, field: str
) -> None:
    told = await refusal(compiler, form)
    assert (told.reason, told.field) == (Reason.REQUEST_INVALID, f"constraint.{field}")


def terminals_in_terminals(last: str) -> str:
    """A grammar that the library takes seconds to refuse."""
    lines = "\n".join(f'R{i}: R{i + 1}* | "b"' for i in range(2500))
    return f'start: R0\n{lines}\nR2500: "{last}"'


BOMBS = {
    "options of options": forms.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "integer"}},
                               "required": [f"k{i}{j}"]} for j in range(8)]} for i in range(7)]}
    ),
    "repeated repeats": forms.regex("(a{1000}){1000}"),
    "terminals in terminals": forms.grammar(terminals_in_terminals("z")),
    "multiples of primes": forms.json_schema({"type": "integer", "multipleOf": 10**9 + 7}),
}  # fmt: skip


@pytest.mark.parametrize("form", BOMBS.values(), ids=BOMBS.keys())
async def test_a_bomb_is_refused_within_the_limit_of_time(compiler: Compiler, form: Form) -> None:
    await compiler.compile(forms.json_object())  # the trial process is up
    began = time.monotonic()
    told = await refusal(compiler, form)
    assert time.monotonic() - began < LIMITS.compile_seconds + 6
    assert told.reason in {Reason.REQUEST_INVALID, Reason.UNSUPPORTED}
    await compiler.compile(forms.regex("[0-9]{3}"))


async def test_a_grammar_that_overflows_the_librarys_stack_harms_nobody(
    vocabulary: Vocabulary,
) -> None:
    compiler = Compiler(vocabulary, ConstraintLimits(text_bytes=1 << 20, compile_seconds=20))
    try:
        told = await refusal(compiler, forms.grammar(chained(40_000)))
        assert told.reason is Reason.REQUEST_INVALID
        await compiler.compile(forms.choice("still", "here"))
    finally:
        await compiler.close()


async def test_a_caller_who_leaves_spoils_nobody_elses_answer(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    # Not a bomb that a test before has sent: what is refused is kept.
    bomb = forms.grammar(terminals_in_terminals("y"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await compiler.compile(bomb)
    write(await compiler.compile(forms.choice("left", "right")), "right", tokenizer)


async def test_a_form_that_was_given_up_costs_its_time_once(compiler: Compiler) -> None:
    bomb = forms.grammar(terminals_in_terminals("w"))
    told = await asyncio.gather(*(refusal(compiler, bomb) for _ in range(12)))
    began = time.monotonic()
    told.append(await refusal(compiler, bomb))
    assert time.monotonic() - began < LIMITS.compile_seconds / 2
    assert {one.message for one in told} == {told[0].message}
    assert told[0].reason is Reason.REQUEST_INVALID


async def test_new_forms_beyond_the_queue_are_refused_with_a_hint(compiler: Compiler) -> None:
    known = forms.regex("[0-9]{4}")
    await compiler.compile(known)
    bombs = [forms.grammar(terminals_in_terminals(f"q{number}")) for number in range(16)]
    waiting = [asyncio.create_task(compiler.compile(bomb)) for bomb in bombs]
    await asyncio.sleep(0)
    told = await refusal(compiler, forms.regex("[0-9]{5}"))
    assert (told.reason, told.retry_after) == (Reason.QUEUE_FULL, 3.0)
    await compiler.compile(known)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await compiler.compile(forms.regex("[0-9]{5}"))


async def test_equal_constraints_compile_once_and_share_no_state(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    form = forms.json_schema({"const": "red star"})
    first, second = await asyncio.gather(compiler.compile(form), compiler.compile(form))
    write(first, '"red star"', tokenizer)
    assert first.ended
    assert not second.ended
    write(second, '"red star"', tokenizer)


async def test_a_fork_goes_on_by_itself(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = await compiler.compile(forms.choice("red star", "red moon"))
    write(constraint, "red", tokenizer)
    other = constraint.fork()
    write(other, " moon", tokenizer)
    write(constraint, " star", tokenizer)
    assert constraint.ended
    assert other.ended


async def test_the_end_comes_only_where_the_answer_may_end(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    constraint = await compiler.compile(forms.regex("[0-9]{2,}"))
    write(constraint, "1", tokenizer)
    assert not constraint.allowed()[EOS]
    write(constraint, "2", tokenizer)
    assert constraint.allowed()[EOS]
    constraint.advance(EOS)
    assert constraint.ended


@pytest.mark.parametrize(
    "form", [forms.json_object(), forms.regex("(?s:.*)"), forms.json_schema({"type": "string"})]
)
async def test_neither_special_tokens_nor_rows_without_a_token_come(
    compiler: Compiler, tokenizer: Tokenizer, form: Form
) -> None:
    constraint = await compiler.compile(form)
    start = '{"a' if form.json_object else '"a'
    write(constraint, start, tokenizer)
    allowed = constraint.allowed()
    assert (allowed.shape, allowed.dtype) == ((SIZE,), torch.bool)
    assert allowed.any()
    assert not allowed[[one for one in SPECIAL if one != EOS]].any()
    assert not allowed[tokenizer.get_vocab_size() :].any()


async def test_a_token_that_may_not_come_breaks_that_answer(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    constraint = await compiler.compile(forms.choice("red"))
    with pytest.raises(ConstraintBroken):
        constraint.advance(tokenizer.encode("blue", add_special_tokens=False).ids[0])


async def test_masks_over_their_budget_of_time_break_that_answer(vocabulary: Vocabulary) -> None:
    matcher = LLMatcher(vocabulary.tokenizer, LLMatcher.grammar_from_regex("a*"))
    GrammarConstraint(matcher, vocabulary, MaskBudget(flat=60)).allowed()
    hurried = GrammarConstraint(matcher, vocabulary, MaskBudget(flat=0, per_token=0))
    with pytest.raises(ConstraintBroken):
        hurried.allowed()


async def test_a_tokenizer_that_the_library_does_not_know_serves_no_constraints() -> None:
    compiler = Compiler(None, LIMITS)
    told = await refusal(compiler, forms.json_object())
    assert (told.reason, told.field) == (Reason.UNSUPPORTED, "constraint")
    await compiler.close()


async def test_names_in_a_message_are_cut_and_printable(compiler: Compiler) -> None:
    schema: Any = {"properties": {"\n\x1b" + "long" * 500: {"not": {}}}}
    told = await refusal(compiler, Form(json_schema=json.dumps(schema)))
    assert len(told.message) < 300
    assert told.message.isprintable()
