"""The tools that a request offers, from the wire to checked values. Pure; raises ChiasmError."""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import llm_service_pb2

MAX_TOOLS: Final = 128
# Of all definitions together, in UTF-8.
MAX_BYTES: Final = 256 * 1024
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAMED: Final = "function:"
_CHOICES: Final = ("auto", "none", "required")
_DEPTH: Final = 64
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

Choice = Literal["auto", "required", "named"]


@dataclass(frozen=True)
class Function:
    """A function that may be called.

    Attributes:
        parameters: the JSON schema of its arguments, an object.
        strict: refuse the request rather than enforce less than the whole schema.
        place: the field that it came from.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    place: str


@dataclass(frozen=True)
class Tools:
    """Tools in force.

    Attributes:
        definitions: as the chat template takes them.
        functions: those of which a call may be.
        parallel: an answer may hold more than one call.
    """

    definitions: tuple[dict[str, Any], ...]
    functions: tuple[Function, ...]
    choice: Choice
    parallel: bool


def read_tools(message: llm_service_pb2.ToolOptions) -> Tools | None:
    """What `message` offers; None for no tools, and for tools that must not be called.

    Raises REQUEST_INVALID with the field at fault.
    """
    definitions, functions = _read_all(message)
    wanted = message.tool_choice if message.HasField("tool_choice") else "auto"
    choice = _choice(wanted)
    if choice is None:
        return None
    if not functions:
        if choice == "auto":
            return None
        text = "A tool choice needs tools; send them, or leave it out."
        raise _invalid("tools.tool_choice", text)
    if choice == "named":
        functions = _only(wanted.removeprefix(_NAMED), functions)
    parallel = message.parallel_tool_calls or not message.HasField("parallel_tool_calls")
    return Tools(definitions, functions, choice, parallel and choice != "named")


def _read_all(
    message: llm_service_pb2.ToolOptions,
) -> tuple[tuple[dict[str, Any], ...], tuple[Function, ...]]:
    texts = message.tools_json
    if len(texts) > MAX_TOOLS:
        raise _invalid("tools.tools_json", f"At most {MAX_TOOLS} tools, but {len(texts)} came.")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_BYTES:
        text = f"All tools together have {size} bytes; at most {MAX_BYTES} are accepted."
        raise _invalid("tools.tools_json", text)
    read = [_read(text, f"tools.tools_json[{number}]") for number, text in enumerate(texts)]
    _check_distinct([function for _, function in read])
    return tuple(one for one, _ in read), tuple(function for _, function in read)


def _read(text: str, place: str) -> tuple[dict[str, Any], Function]:
    definition = _parsed(text, place)
    if not isinstance(definition, dict) or definition.get("type") != "function":
        raise _invalid(f"{place}.type", "A tool is an object of the type function.")
    function = definition.get("function")
    if not isinstance(function, dict):
        raise _invalid(f"{place}.function", "A tool needs a function, an object.")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        said = "A function's name has 1 to 64 letters, digits, underscores and hyphens."
        raise _invalid(f"{place}.function.name", said)
    if description is not None and not isinstance(description, str):
        raise _invalid(f"{place}.function.description", "A description is a text.")
    parameters = _parameters(function, f"{place}.function.parameters")
    return definition, Function(name, parameters, function.get("strict") is True, place)


def _parameters(function: dict[str, Any], place: str) -> dict[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return dict(_NO_PARAMETERS)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise _invalid(place, "The parameters are a JSON schema of the type object.")
    return {"type": "object", **schema}


def _parsed(text: str, place: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if _too_deep(value):
            raise _invalid(place, f"The definition nests more than {_DEPTH} deep.")
    except (ValueError, RecursionError):
        raise _invalid(place, "The definition is not valid JSON.") from None
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _check_distinct(functions: list[Function]) -> None:
    seen: set[str] = set()
    for function in functions:
        if function.name in seen:
            place = f"{function.place}.function.name"
            raise _invalid(place, "Two tools have this name; give each a name of its own.")
        seen.add(function.name)


def _choice(wanted: str) -> Choice | None:
    if wanted.startswith(_NAMED):
        return "named"
    match wanted:
        case "none":
            return None
        case "auto" | "required":
            return wanted
    text = f"The choice is one of {', '.join(_CHOICES)}, or {_NAMED} and the name of a function."
    raise _invalid("tools.tool_choice", text)


def _only(name: str, functions: tuple[Function, ...]) -> tuple[Function, ...]:
    found = tuple(one for one in functions if one.name == name)
    if not found:
        raise _invalid("tools.tool_choice", "The chosen function is not among the tools.")
    return found


def _invalid(field: str, message: str) -> ChiasmError:
    return ChiasmError(Reason.REQUEST_INVALID, message, field)
