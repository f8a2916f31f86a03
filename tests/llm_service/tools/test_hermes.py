"""Calls in an answer's text, however it is cut into pieces."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llm_service.tools.hermes import Calls

NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12)
    | st.sampled_from(["}\n</tool_call>", "<tool_call>", "</tool_call>", '"}}']),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(max_size=6), VALUES, max_size=3)))
TEXTS = st.text(max_size=20).filter(lambda text: "<tool_call>" not in text)


def written(calls: list[tuple[str, dict[str, object]]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def read(parts: list[str]) -> tuple[str, Calls, dict[int, tuple[str, str]]]:
    """The text, the parser, and each call as its deltas tell it."""
    calls, texts, told = Calls(), [], dict[int, tuple[str, str]]()
    for part in parts:
        text, deltas = calls.push(part)
        texts.append(text)
        for delta in deltas:
            name, arguments = told.get(delta.index, (delta.name or "", ""))
            assert (delta.name is None) == (delta.index in told)
            assert (delta.id is None) == (delta.index in told)
            told[delta.index] = (name, arguments + delta.arguments)
    rest, deltas = calls.close()
    for delta in deltas:
        told[delta.index] = (told[delta.index][0], told[delta.index][1] + delta.arguments)
    return "".join(texts) + rest, calls, told


@given(TEXTS, CALLS, st.lists(st.integers(0, 10_000), max_size=12))
def test_calls_and_text_are_the_same_however_they_are_cut(
    text: str, calls: list[tuple[str, dict[str, object]]], cuts: list[int]
) -> None:
    said, parser, told = read(pieces(text + written(calls), cuts))
    assert said == text
    assert not parser.cut
    assert [(one.name, json.loads(one.arguments)) for one in parser.made] == calls
    assert [(name, json.loads(arguments)) for name, arguments in told.values()] == calls
    assert len({one.id for one in parser.made}) == len(calls)


@given(TEXTS, st.lists(st.integers(0, 100), max_size=6))
def test_text_without_calls_is_all_text(text: str, cuts: list[int]) -> None:
    said, parser, told = read(pieces(text, cuts))
    assert (said, parser.made, told) == (text, [], {})


ARGUMENTS = '{"city": {"name": "Oslo}"}}'


def test_a_call_that_was_cut_has_what_came_of_its_arguments() -> None:
    head = 'Well. <tool_call>\n{"name": "weather", "arguments": '
    whole = head + ARGUMENTS + "}\n</tool_call>"
    for end in range(len("Well. <tool_call>"), len(whole)):
        said, parser, told = read([whole[:end]])
        assert (said, parser.cut) == ("Well. ", True)
        expected = ARGUMENTS if end > len(head) + len(ARGUMENTS) else whole[len(head) : end]
        assert [one.arguments for one in parser.made] == ([expected] if end >= len(head) else [])
        assert [arguments for _, arguments in told.values()] == [
            one.arguments for one in parser.made
        ]


def test_a_mark_that_was_cut_is_text_unless_a_call_was_forced() -> None:
    for forced, expected in ((False, "<tool_c"), (True, "")):
        calls = Calls(forced=forced)
        assert calls.push("<tool_c") == ("", [])
        assert calls.close() == (expected, [])
