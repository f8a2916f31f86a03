"""The models that check requests, and those that describe answers, as JSON Schema (2020-12)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.openai.completions import CompletionRequest
from gateway.openai.constraint import Forms
from gateway.openai.responses.schema import ResponsesRequest
from gateway.openai.responses.to_chat import SHARED
from gateway.openai.schema import ChatRequest
from gateway.openapi import answers
from gateway.tokens import DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]
Property = Callable[[Schema], Schema]
_PREFIX: Final = "#/components/schemas/"
_NULL: Final[Schema] = {"type": "null"}
# Of all texts of a request: see `gateway.openai.base.sound`.
_NO_NUL: Final = "^[^\\u0000]*$"
# Known only to be refused by name.
_REFUSED: Final = ("UnservedPart", "ItemReference")


def ref(name: str) -> Schema:
    """A reference to the schema `name` of the document."""
    return {"$ref": _PREFIX + name}


def or_text(schema: Schema) -> Schema:
    """A text in place of a list of it, or of an object about it."""
    text = schema["items"] if schema.get("type") == "array" else {"type": "string"}
    return {"anyOf": [text, schema]}


def _any_of(*schemas: Schema) -> Property:
    return lambda _: {"anyOf": list(schemas)}


_BIASES: Final[Schema] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_FORMAT: Final = _any_of(ref("TextFormat"), ref("ObjectFormat"), ref("SchemaFormat"))
# What a model's validators take or refuse beyond what its annotations say.
_BEYOND: Final[Mapping[tuple[str, str], Property]] = {
    ("ChatRequest", "stop"): or_text,
    ("CompletionRequest", "stop"): or_text,
    ("ChatRequest", "logit_bias"): lambda _: _BIASES,
    ("CompletionRequest", "logit_bias"): lambda _: _BIASES,
    ("ChatRequest", "response_format"): _FORMAT,
    ("ImageUrlPart", "image_url"): or_text,
    ("TokenizeRequest", "messages"): lambda _: {
        "type": "array", "minItems": 1, "items": ref("Message"),
    },
    ("TokenizeRequest", "return_token_strs"): lambda _: {"const": False},
}  # fmt: skip
# Fields that are read by a part of the gateway that has models of its own.
_FORM_FIELDS: Final = tuple(Forms.model_fields)
_OF_A_CHAT: Final = ("tools", "tool_choice", "chat_template_kwargs", "mm_processor_kwargs")


def _only(name: str, other: str) -> Schema:
    """A body with the field `name` and without `other`."""
    return {"required": [name], "properties": {name: {"not": _NULL}, other: _NULL}}


def one_of_two(first: str, second: str) -> Schema:
    """A body with one of two fields."""
    return {"anyOf": [_only(first, second), _only(second, first)]}


def _needs(name: str, other: str, told: Schema) -> Schema:
    """Where the field `name` is set, `other` must be true."""
    given = {"required": [name], "properties": {name: told}}
    return {"if": given, "then": {"required": [other], "properties": {other: {"const": True}}}}


_STREAMED: Final = _needs("stream_options", "stream", {"type": "object"})
# What fields of one model must be like together.
_TOGETHER: Final[Mapping[str, Schema]] = {
    "ChatRequest": {
        "allOf": [
            _STREAMED,
            _needs("top_logprobs", "logprobs", {"type": "integer", "minimum": 1}),
        ]
    },
    "CompletionRequest": _STREAMED,
    "Message": {
        "anyOf": [
            {"properties": {"role": {"const": "assistant"}}},
            {"required": ["content"], "properties": {"content": {"not": _NULL}}},
        ]
    },
    "TokenizeRequest": one_of_two("prompt", "messages"),
}


def request_schemas() -> dict[str, Schema]:
    """By name, all that requests are made of."""
    chat = _of(ChatRequest, CompletionRequest, Forms, TokenizeRequest, DetokenizeRequest)
    responses = _of(ResponsesRequest, prefix="Responses")
    forms = chat.pop("Forms")["properties"]
    fields = chat["ChatRequest"]["properties"]
    fields |= {name: forms[name] for name in _FORM_FIELDS}
    found = (chat | responses).items()
    schemas = {name: _told(name, one) for name, one in found if not name.endswith(_REFUSED)}
    told = schemas["ChatRequest"]["properties"]
    request = schemas["ResponsesRequest"]
    request["properties"] |= {name: told[name] for name in SHARED}
    request["required"].append("model")
    # Beside a text nobody looks at what belongs to a conversation.
    conversation = schemas["TokenizeRequest"]["anyOf"][1]["properties"]
    conversation |= {name: told[name] for name in _OF_A_CHAT}
    return schemas


def answer_schemas() -> dict[str, Schema]:
    """By name, all that answers are made of."""
    models = [kind for kind in vars(answers).values() if _describes(kind)]
    return {name: _plain(schema) for name, schema in _of(*models).items()}


def _describes(kind: Any) -> bool:
    return (
        isinstance(kind, type) and issubclass(kind, answers.Answer) and kind is not answers.Answer
    )


def _of(*models: type[BaseModel], prefix: str = "") -> dict[str, Schema]:
    template = f"{_PREFIX}{{model}}"
    inputs = [(model, "validation") for model in models]
    _, found = models_json_schema(inputs, ref_template=template)  # type: ignore[arg-type]
    named: dict[str, Schema] = found["$defs"]
    names = {name: _prefixed(name, prefix) for name in named}
    return {names[name]: _renamed(schema, names) for name, schema in named.items()}


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(prefix) else prefix + name


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    if isinstance(node, list):
        return [_renamed(one, names) for one in node]
    if not isinstance(node, dict):
        return node
    inner = {key: _renamed(value, names) for key, value in node.items()}
    if isinstance(inner.get("$ref"), str):
        inner["$ref"] = _PREFIX + names[inner["$ref"].removeprefix(_PREFIX)]
    return inner


def _told(name: str, schema: Schema) -> Schema:
    """A request's schema as the gateway judges: null is absent, no text holds a NUL."""
    plain: Schema = _without_nul(_plain(schema))
    properties = plain.get("properties", {})
    for field, inner in properties.items():
        beyond = _BEYOND.get((name, field))
        told = inner if beyond is None else beyond(_without_null(inner))
        properties[field] = told if field in plain.get("required", ()) else _nullable(told)
    return plain | _TOGETHER.get(name, {})


def _plain(node: Any) -> Any:
    """Without the titles that only repeat a name, and without what is refused anyway."""
    if isinstance(node, list):
        return [_plain(one) for one in node if not _is_refused(one)]
    if not isinstance(node, dict):
        return node
    told = {key: _plain(value) for key, value in _known(node)}
    if "properties" in node:
        told["properties"] = {key: _plain(value) for key, value in node["properties"].items()}
    return told


def _known(node: Schema) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "default" and value is None:
            continue
        # Which of them it is, their own fields tell.
        yield ("anyOf" if key == "oneOf" else key), value


def _is_refused(node: Any) -> bool:
    found = node.get("$ref", "") if isinstance(node, dict) else ""
    return isinstance(found, str) and found.endswith(_REFUSED)


def _without_nul(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_nul(one) for one in node]
    if not isinstance(node, dict):
        return node
    told = {key: _without_nul(value) for key, value in node.items()}
    if node.get("type") == "string" and not {"pattern", "enum", "const"} & node.keys():
        told["pattern"] = _NO_NUL
    return told


def _nullable(schema: Schema) -> Schema:
    if schema == {} or _NULL in schema.get("anyOf", ()):
        return schema
    return {"anyOf": [*_alternatives(schema), _NULL]} | _beside(schema)


def _without_null(schema: Schema) -> Schema:
    others = [one for one in schema.get("anyOf", ()) if one != _NULL]
    return others[0] if len(others) == 1 else schema


def _alternatives(schema: Schema) -> Sequence[Schema]:
    if "anyOf" in schema:
        found: Sequence[Schema] = schema["anyOf"]
        return found
    return [{key: value for key, value in schema.items() if key != "default"}]


def _beside(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key == "default"}
