"""Where in the JSON a fault lies: the validator's location as OpenAI writes a `param`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from chiasm.errors import ChiasmError
from gateway.openai.errors import invalid

PART_TYPE: Final = "part_type"
# OpenAI's code of a fault, by the validator's type of it. All others are `invalid_value`.
_CODES: Final[Mapping[str, str]] = {
    "missing": "missing_required_parameter",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than_equal": "above_max_value",
}


def told(fault: Mapping[str, Any]) -> ChiasmError:
    """The error that tells one of pydantic's `errors()`, made without the input or the URL."""
    kind: str = fault["type"]
    param = _param(fault["loc"]) or None
    if kind == PART_TYPE:
        param = f"{param}.type"
    return invalid(_message(kind, param, fault["msg"]), param, _code(kind))


def _param(place: Sequence[str | int]) -> str:
    """`messages[0].content[1].image_url.url`. Names in angle brackets are the schema's own tags."""
    path = ""
    for step in place:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path


def _code(kind: str) -> str:
    if kind in _CODES:
        return _CODES[kind]
    return "invalid_type" if kind.endswith("_type") and kind != PART_TYPE else "invalid_value"


def _message(kind: str, param: str | None, found: str) -> str:
    if kind == "missing":
        return f"The required field {param} is missing."
    if kind == "model_type":
        return "Input should be an object."
    return found if found.endswith(".") else f"{found}."
