"""The constraint of a request, from the wire to the text of a grammar. Pure; raises ChiasmError."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2
from llm_service.constraint import json_schema, lark
from llm_service.constraint.limits import ConstraintLimits

# Compact JSON: a small model that may write blanks between any two tokens writes them for ever.
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True)
class Requested:
    """A grammar in the library's own form, and the field of the request that it came from."""

    grammar: str
    field: str

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.grammar.encode()).digest()


def read_constraint(
    message: llm_service_pb2.OutputConstraint, limits: ConstraintLimits
) -> Requested:
    """The grammar that the answer must keep. Raises REQUEST_INVALID and UNSUPPORTED."""
    kind = message.WhichOneof("kind")
    match kind:
        case "json_object":
            if not message.json_object:
                raise _invalid("json_object", "json_object is true, or the constraint is absent.")
            return _of_schema(json_schema.ANY_OBJECT, "json_object", limits)
        case "json_schema":
            return _of_schema(message.json_schema, "json_schema", limits)
        case "regex":
            text = _text(message.regex, "regex", limits)
            return Requested(LLMatcher.grammar_from_regex(text), _field("regex"))
        case "choice":
            return _of_choices(message.choice.choices, limits)
        case "grammar":
            text = _text(message.grammar, "grammar", limits)
            lark.check(text)
            return Requested(wrapped({"lark_grammar": text}), _field("grammar"))
        case _:
            raise ChiasmError(
                Reason.REQUEST_INVALID,
                "A constraint is one of json_object, json_schema, regex, choice and grammar.",
                "constraint",
            )


def _of_schema(text: str, kind: str, limits: ConstraintLimits) -> Requested:
    schema = json_schema.exact(_text(text, kind, limits), limits.depth)
    schema["x-guidance"] = _JSON_OPTIONS
    return Requested(wrapped({"json_schema": schema}), _field(kind))


def _of_choices(choices: Sequence[str], limits: ConstraintLimits) -> Requested:
    if not choices:
        raise _invalid("choice.choices", "A choice needs at least one text.")
    if len(choices) > limits.choices:
        text = f"At most {limits.choices} texts to choose from, but {len(choices)} came."
        raise _invalid("choice.choices", text)
    for number, choice in enumerate(choices):
        if not choice:
            raise _invalid(f"choice.choices[{number}]", "A text has at least one character.")
    _text("".join(choices), "choice.choices", limits)
    return Requested(wrapped({"lark_grammar": lark.of_choices(choices)}), _field("choice.choices"))


def _text(text: str, kind: str, limits: ConstraintLimits) -> str:
    if not text:
        raise _invalid(kind, "It has at least one character.")
    size = len(text.encode())
    if size > limits.text_bytes:
        raise _invalid(kind, f"It has {size} bytes; at most {limits.text_bytes} are accepted.")
    return text


def wrapped(grammar: dict[str, Any]) -> str:
    """One grammar in the form that the library takes several."""
    return json.dumps({"grammars": [grammar]})


def _field(kind: str) -> str:
    return f"constraint.{kind}"


def _invalid(kind: str, message: str) -> ChiasmError:
    return ChiasmError(Reason.REQUEST_INVALID, message, _field(kind))
