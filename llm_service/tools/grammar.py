"""The grammar of an answer that may call tools. Pure; raises ChiasmError."""

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from chiasm.errors import ChiasmError, Reason
from llm_service.constraint import json_schema
from llm_service.constraint.limits import ConstraintLimits
from llm_service.constraint.requested import Requested, wrapped
from llm_service.tools.hermes import BEFORE_ARGUMENTS, BEFORE_NAME, CLOSE, OPEN
from llm_service.tools.offered import Function, Tools

# As json.dumps writes it, and so what these models were trained on.
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
_ANY_ARGUMENTS: Final = {"type": "object"}


def grammar_of(
    tools: Tools,
    limits: ConstraintLimits,
    answer: str | None = None,
    loose: Collection[str] = (),
) -> Requested:
    """What an answer keeps that may, or must, call one of `tools`.

    Args:
        answer: the schema of an answer without a call, as JSON text; None for free text.
        loose: names of functions whose arguments are any object.

    Raises UNSUPPORTED or REQUEST_INVALID for a schema that cannot be enforced.
    """
    schemas = [
        dict(_ANY_ARGUMENTS) if one.name in loose else _schema_of(one, limits)
        for one in tools.functions
    ]
    return _requested(tools, schemas, None if answer is None else _exact(answer, limits))


def arguments_of(function: Function, limits: ConstraintLimits) -> Requested:
    """The grammar of one function's arguments alone, and their field. Raises as `grammar_of`."""
    schema = _schema_of(function, limits) | {"x-guidance": _JSON_OPTIONS}
    return Requested(wrapped({"json_schema": schema}), f"{function.place}.function.parameters")


def _requested(
    tools: Tools, schemas: Sequence[dict[str, Any]], answer: dict[str, Any] | None
) -> Requested:
    lines = [*_start(tools, answer), *_calls(tools.functions, schemas)]
    return Requested(wrapped({"lark_grammar": "\n".join(lines)}), "tools.tools_json")


def _start(tools: Tools, answer: dict[str, Any] | None) -> list[str]:
    begin, between = json.dumps(OPEN), json.dumps("\n")
    several = f"call ({between} call)*" if tools.parallel else "call"
    call = f"call: {begin} any_call"
    if tools.choice != "auto":
        return [f"start: {several}", call]
    if answer is not None:
        return [f"start: calls | {_json(answer)}", f"calls: {several}", call]
    start = "start: call* rest" if tools.parallel else "start: call | rest"
    # Lazy: the first OPEN in a text begins a call, whatever else might match it.
    return [
        start, "call: before any_call", f"before[lazy]: TEXT {begin}", "rest: TEXT",
        r"TEXT: /(.|\n)*/",
    ]  # fmt: skip


def _calls(functions: Sequence[Function], schemas: Sequence[dict[str, Any]]) -> list[str]:
    names = " | ".join(f"call_{number}" for number in range(len(functions)))
    lines = [f"any_call: ({names}) {json.dumps('}' + CLOSE)}"]
    for number, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
        head = json.dumps(f"{BEFORE_NAME}{function.name}{BEFORE_ARGUMENTS}")
        lines.append(f"call_{number}: {head} {_json(schema)}")
    return lines


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _schema_of(function: Function, limits: ConstraintLimits) -> dict[str, Any]:
    try:
        return _exact(json.dumps(function.parameters), limits)
    except ChiasmError as error:
        place = f"{function.place}.function.parameters"
        raise ChiasmError(error.reason, error.message, place) from None


def _exact(schema: str, limits: ConstraintLimits) -> dict[str, Any]:
    if len(schema.encode()) > limits.text_bytes:
        text = f"The schema has more than {limits.text_bytes} bytes."
        raise ChiasmError(Reason.REQUEST_INVALID, text, json_schema.FIELD)
    return json_schema.exact(schema, limits.depth)
