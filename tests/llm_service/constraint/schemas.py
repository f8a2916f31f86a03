"""Schemas of one feature each, and answers checked against them by an independent validator."""

import json
from datetime import datetime
from typing import Any

import jsonschema


def one(schema: Any) -> dict[str, Any]:
    """An object with one property, so that the answer has an end."""
    return {
        "type": "object",
        "properties": {"v": schema},
        "required": ["v"],
        "additionalProperties": False,
    }


_NODE = {
    "type": "object",
    "properties": {
        "v": {"enum": [1, 2]},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "nested objects": one(one(one({"enum": [1, 2]}))),
    "some required": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "enum": one({"enum": ["red", "green", 3, None, {"x": [1]}]}),
    "const": one({"const": {"k": [1, "two", "é\n"]}}),
    "anyOf": one({"anyOf": [{"enum": [5, 6]}, {"type": "string", "maxLength": 3}]}),
    "anyOf beside bounds": one(
        {"type": "integer", "minimum": 3, "anyOf": [{"maximum": 9}, {"enum": [90, 99, 1]}]}
    ),
    "oneOf apart": one({"oneOf": [{"enum": [1, 2]}, {"type": "boolean"}]}),
    "allOf": one({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}),
    "recursive": {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "pattern": one({"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}),
    "pattern within": one({"type": "string", "pattern": "[0-9]z", "maxLength": 10}),
    "date-time": one({"type": "string", "format": "date-time"}),
    "date": one({"type": "string", "format": "date"}),
    "uuid": one({"type": "string", "format": "uuid"}),
    "ipv4": one({"type": "string", "format": "ipv4"}),
    "email": one({"type": "string", "format": "email", "maxLength": 16}),
    "integer bounds": one({"type": "integer", "minimum": -3, "maximum": 12}),
    "exclusive bounds": one({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}),
    "multipleOf": one({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}),
    "length": one({"type": "string", "minLength": 2, "maxLength": 4}),
    "items": one({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}),
    "prefixItems": one(
        {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}],
            "items": False,
            "minItems": 2,
        }
    ),
    "type list": one({"type": ["null", "boolean"]}),
    "odd names": one({"const": 1}) | {"properties": {"v": {"const": 1}, 'q"\n': {"const": 2}}},
}
# Where a small model may write a text without end.
UNBOUNDED = [SCHEMAS["recursive"], SCHEMAS["additionalProperties"]]


def check(text: str, schema: Any) -> None:
    """Raises unless `text` is JSON that validates, formats included."""
    value = json.loads(text)
    validator = jsonschema.Draft202012Validator
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
    properties = schema.get("properties", {})
    # The validator checks this one only beside a package of its own.
    if properties.get("v", {}).get("format") == "date-time":
        datetime.fromisoformat(value["v"])
