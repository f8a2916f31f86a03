"""Schemas of one feature each, for `benchmarks.grammar`."""

from typing import Any, Final

Schema = dict[str, Any]


def one(schema: Any, **more: Any) -> Schema:
    """An object of one property, so that answers are short."""
    return {
        "type": "object",
        "properties": {"v": schema},
        "required": ["v"],
        "additionalProperties": False,
    } | more


_TEXT: Final = {"type": "string"}
_BOOLEAN: Final = {"type": "boolean"}
_INTEGER: Final = {"type": "integer"}
_NODE: Final = {
    "type": "object",
    "properties": {"v": _INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
_TWO_FLAGS: Final = {"type": "object", "properties": {"a": _BOOLEAN, "b": _BOOLEAN}}
_THREES: Final = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 3}

FEATURES: Final[dict[str, Schema]] = {
    "nested objects": one(one(one(_INTEGER))),
    "required": _TWO_FLAGS | {"required": ["b"], "additionalProperties": False},
    "enum": one({"enum": ["red", "green", 3, None, {"x": [1]}]}),
    "const": one({"const": {"k": [1, "two"]}}),
    "anyOf": one({"anyOf": [_INTEGER, _TEXT | {"maxLength": 3}]}),
    "anyOf beside bounds": one(
        _INTEGER | {"minimum": 3, "anyOf": [{"maximum": 9}, {"minimum": 90, "maximum": 99}]}
    ),
    "oneOf, apart": one({"oneOf": [_INTEGER, _BOOLEAN]}),
    "oneOf, overlapping": one(
        {"oneOf": [{"enum": [1, 2, 3, 4]}, {"enum": [3, 4, 5]}]},
    ),
    "allOf": one({"allOf": [_INTEGER | {"minimum": 3}, {"maximum": 9}]}),
    "not": one({"enum": [0, 1, 2, 3], "not": {"const": 2}}),
    "$defs, recursive $ref": {"$defs": {"n": _NODE}, "$ref": "#/$defs/n"},
    "$ref to another document": {"$ref": "https://example.com/schema.json"},
    "additionalProperties": {
        "type": "object",
        "properties": {"a": _INTEGER},
        "additionalProperties": _BOOLEAN,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": _BOOLEAN},
        "additionalProperties": False,
    },
    "propertyNames": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]$"},
        "additionalProperties": _BOOLEAN,
    },
    "pattern": one(_TEXT | {"pattern": "^[A-Z]{3}-[0-9]{2}$"}),
    "pattern, look-ahead": one(_TEXT | {"pattern": "^(?=.*z)[a-z]{3}$"}),
    "pattern and length": one(_TEXT | {"pattern": "[0-9]z", "maxLength": 6}),
    "format date-time": one(_TEXT | {"format": "date-time"}),
    "format date": one(_TEXT | {"format": "date"}),
    "format uuid": one(_TEXT | {"format": "uuid"}),
    "format email": one(_TEXT | {"format": "email"}),
    "format ipv4": one(_TEXT | {"format": "ipv4"}),
    "format, unknown": one(_TEXT | {"format": "banana"}),
    "integer bounds": one(_INTEGER | {"minimum": -3, "maximum": 12}),
    "number bounds": one({"type": "number", "minimum": -1.5, "maximum": 2.25}),
    "exclusive bounds": one(_INTEGER | {"exclusiveMinimum": 0, "exclusiveMaximum": 3}),
    "multipleOf": one(_INTEGER | {"multipleOf": 7, "minimum": 0, "maximum": 700}),
    "multipleOf, fraction": one({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9}),
    "minLength, maxLength": one(_TEXT | {"minLength": 2, "maxLength": 4}),
    "minItems, maxItems": one({"type": "array", "items": _BOOLEAN, "minItems": 2, "maxItems": 4}),
    "prefixItems": one(
        {"type": "array", "prefixItems": [_BOOLEAN, _INTEGER], "items": False, "minItems": 2}
    ),
    "uniqueItems": one(_THREES | {"uniqueItems": True}),
    "contains": one(_THREES | {"contains": {"const": 3}}),
    "type list": one({"type": ["integer", "null", "boolean"]}),
    "null": one({"type": "null"}),
    "minProperties": {
        "type": "object",
        "additionalProperties": _BOOLEAN,
        "minProperties": 2,
        "maxProperties": 3,
    },
    "dependentRequired": _TWO_FLAGS
    | {"additionalProperties": False, "dependentRequired": {"a": ["b"]}},
    "if, then": _TWO_FLAGS
    | {
        "additionalProperties": False,
        "required": ["a"],
        "if": {"properties": {"a": {"const": True}}},
        "then": {"required": ["b"]},
    },
    "unevaluatedProperties": _TWO_FLAGS | {"unevaluatedProperties": False},
    "nothing fits": one(_INTEGER | {"minimum": 5, "maximum": 3}),
}
TIMED: Final = (
    "nested objects", "enum", "anyOf", "$defs, recursive $ref", "additionalProperties",
    "pattern and length", "format date-time", "format email", "number bounds", "prefixItems",
)  # fmt: skip
