"""Checks a JSON schema and makes it exact, before the grammar library sees it. Pure.

The library refuses every keyword of every draft that it cannot enforce, and so do we, with the
place. It does not refuse, and is wrong about: what is handled here. JSON Schema says that a keyword
which no draft defines asserts nothing; such are ignored, as every validator does.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from chiasm.errors import ChiasmError, Reason

FIELD: Final = "constraint.json_schema"
ANY_OBJECT: Final = '{"type":"object"}'

_UNENFORCED: Final = frozenset({
    "$dynamicRef", "$recursiveRef", "additionalItems", "contains", "dependencies",
    "dependentRequired", "dependentSchemas", "disallow", "divisibleBy", "else", "extends", "if",
    "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties",
})  # fmt: skip
_MAPS: Final = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE: Final = frozenset({"additionalProperties", "items"})
# The library reads options of its own here, "ignore what you cannot enforce" among them.
_OPTIONS: Final = "x-guidance"

# RFC 3339. The library's own forms let 29 February of any year and second 60 through; year 0 is
# left out because Python, for one, knows none.
_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_MONTH_AND_DAY: Final = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}


def exact(text: str, depth: int) -> dict[str, Any]:
    """The schema in `text` as the library is to enforce it.

    Raises:
        ChiasmError: REQUEST_INVALID for what is no schema or too deep, UNSUPPORTED for a keyword
            that cannot be enforced; the message says where.
    """
    schema = _parsed(text)
    if _depth(schema, depth) > depth:
        raise _invalid(f"The schema nests objects and lists more than {depth} deep.")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _invalid("A schema is a JSON object.")
    rewritten: dict[str, Any] = _rewritten(schema, "#")
    return rewritten


def _parsed(text: str) -> Any:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(schema, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise _invalid("The schema is not valid JSON.") from None
    return schema


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _depth(value: Any, most: int) -> int:
    """Levels of objects and lists, counted no further than one beyond `most`."""
    level, depth = [value], 0
    while depth <= most:
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            break
        depth += 1
    return depth


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _rewritten(schema: Any, place: str) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _invalid(f"At {_shown(place)}: a schema is an object, true or false.")
    _check(schema, place)
    inner = {
        key: _rewritten_value(key, value, f"{place}/{key}")
        for key, value in schema.items()
        if key != _OPTIONS and (key, value) != ("uniqueItems", False)
    }
    return _with_exact_format(inner)


def _rewritten_value(key: str, value: Any, place: str) -> Any:
    if key in _MAPS and isinstance(value, dict):
        return {name: _rewritten(inner, f"{place}/{name}") for name, inner in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [_rewritten(inner, f"{place}/{number}") for number, inner in enumerate(value)]
    return _rewritten(value, place) if key in _SINGLE else value


def _with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("format")
    pattern = _FORMATS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    more = rest.get("allOf", [])
    if not isinstance(more, list):
        return schema  # the library says what is wrong with it
    return rest | {"allOf": [*more, {"pattern": pattern}]}


def _check(schema: Mapping[str, Any], place: str) -> None:
    for key in schema:
        if key in _UNENFORCED:
            raise _unsupported(place, f"{key} cannot be enforced; leave it out.")
    for key, check in _CHECKS.items():
        if key in schema:
            check(schema[key], schema, place)


def _check_unique(value: Any, schema: Mapping[str, Any], place: str) -> None:
    if value is not False:
        raise _unsupported(place, "uniqueItems cannot be enforced; leave it out.")


def _check_nullable(value: Any, schema: Mapping[str, Any], place: str) -> None:
    if value is not False:
        raise _unsupported(place, 'nullable is no JSON Schema; add "null" to the type.')


def _check_exclusive(value: Any, schema: Mapping[str, Any], place: str) -> None:
    if isinstance(value, bool):
        text = "exclusiveMinimum and exclusiveMaximum are numbers, the bounds themselves."
        raise _invalid(f"At {_shown(place)}: {text}")


def _check_items(value: Any, schema: Mapping[str, Any], place: str) -> None:
    if isinstance(value, list):
        raise _unsupported(place, "items is one schema; write prefixItems for one schema each.")


def _check_reference(value: Any, schema: Mapping[str, Any], place: str) -> None:
    if not (isinstance(value, str) and value.startswith("#")):
        raise _unsupported(place, "$ref points inside the schema only; begin it with #.")


def _check_least_properties(value: Any, schema: Mapping[str, Any], place: str) -> None:
    """Further names may come twice, and a reader of JSON counts them once."""
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        return
    required = schema.get("required")
    certain = 1 + (len(required) if isinstance(required, list) else 0)
    if isinstance(value, int | float) and value > certain:
        raise _unsupported(
            place,
            f"minProperties above {certain} cannot be enforced here, for unnamed properties may "
            "repeat; name more of them in required.",
        )


_CHECKS: Final[Mapping[str, Callable[[Any, Mapping[str, Any], str], None]]] = {
    "$ref": _check_reference,
    "exclusiveMaximum": _check_exclusive,
    "exclusiveMinimum": _check_exclusive,
    "items": _check_items,
    "minProperties": _check_least_properties,
    "nullable": _check_nullable,
    "uniqueItems": _check_unique,
}


def _shown(place: str) -> str:
    return "".join(char for char in place if char.isprintable())[:200]


def _invalid(message: str) -> ChiasmError:
    return ChiasmError(Reason.REQUEST_INVALID, message, FIELD)


def _unsupported(place: str, message: str) -> ChiasmError:
    return ChiasmError(Reason.UNSUPPORTED, f"At {_shown(place)}: {message}", FIELD)
