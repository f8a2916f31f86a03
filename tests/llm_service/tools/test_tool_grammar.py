"""What an answer may be that is free to call tools: random walks through the grammar."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llm_service.constraint.limits import ConstraintLimits, parser_limits
from llm_service.tools.grammar import grammar_of
from llm_service.tools.hermes import Calls
from llm_service.tools.offered import Choice, Function, Tools

END = 256
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/pair"}, "note": {"type": "string", "maxLength": 6}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9},
                       "minItems": 2, "maxItems": 2}},
}  # fmt: skip
COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "}\n</tool_call>", '"}}']}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMAS = {"place": PLACE, "paint": COLOUR}


class Bytes:
    """A vocabulary of single bytes."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"</s>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def tools(choice: Choice, *, parallel: bool = True) -> Tools:
    functions = tuple(
        Function(name, schema, strict=True, place="") for name, schema in SCHEMAS.items()
    )
    return Tools((), functions, choice, parallel)


class Walk:
    """One answer, a byte at a time."""

    def __init__(self, grammar: str) -> None:
        self._matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=parser_limits())
        assert not self._matcher.get_error()
        self.text = b""

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def allowed(self) -> list[int]:
        if self._matcher.is_stopped():
            return []
        mask = self._matcher.compute_bitmask()
        return [byte for byte in range(END) if mask[byte >> 3] >> (byte & 7) & 1]

    def says(self, text: str) -> bool:
        """Whether `text` may come; as much of it as may has come then."""
        return all(self._takes(byte) for byte in text.encode())

    def _takes(self, byte: int) -> bool:
        if byte not in self.allowed():
            return False
        self._matcher.consume_token(byte)
        self.text += bytes([byte])
        return True

    def goes_on_to_the_end_of_a_call(self, dice: random.Random) -> None:
        while not self.text.endswith(b"\n</tool_call>"):
            self._takes(dice.choice(self.allowed()))


@pytest.mark.parametrize("seed", range(40))
def test_once_opened_a_call_is_one_of_the_functions(seed: int) -> None:
    walk = Walk(grammar_of(tools("auto"), ConstraintLimits()).grammar)
    assert walk.says("I shall <look. <tool_call>")
    dice = random.Random(seed)
    walk.goes_on_to_the_end_of_a_call(dice)
    assert walk.may_end
    assert walk.says("\n<tool_call>")
    walk.goes_on_to_the_end_of_a_call(dice)
    calls = Calls()
    said, _ = calls.push(walk.text.decode())
    assert (said, len(calls.made), calls.cut) == ("I shall <look. ", 2, False)
    for call in calls.made:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_free_text_is_free_and_may_end_anywhere() -> None:
    walk = Walk(grammar_of(tools("auto"), ConstraintLimits()).grammar)
    for piece in ("Grüße\n", "</tool_call>", "{}", "<tool_cal", "l >"):
        assert walk.may_end
        assert walk.says(piece)


def test_one_call_is_the_end_where_calls_are_not_parallel() -> None:
    walk = Walk(grammar_of(tools("auto", parallel=False), ConstraintLimits()).grammar)
    assert walk.says('<tool_call>\n{"name": "paint", "arguments": {"name": "red"}}\n</tool_call>')
    assert walk.may_end
    assert walk.allowed() == []


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_forced_call_has_no_text_before_it(choice: Choice) -> None:
    walk = Walk(grammar_of(tools(choice), ConstraintLimits()).grammar)
    assert walk.allowed() == [ord("<")]
    assert not walk.says("<tool_call>\nI")


def test_a_schema_is_the_answer_where_no_call_is() -> None:
    answer = json.dumps({"type": "object", "maxProperties": 0, "additionalProperties": False})
    grammar = grammar_of(tools("auto"), ConstraintLimits(), answer).grammar
    assert Walk(grammar).allowed() == sorted(b"<{")
    assert Walk(grammar).says("{}")
