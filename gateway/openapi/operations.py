"""What each route takes and gives, one `Operation` each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.openapi.schemas import Schema, one_of_two, ref
from gateway.safetensors import MEDIA_TYPE

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_READ: Final = (401, 429)
_BODY: Final = (400, 401, 404, 408, 413, 415, 429, 500, 502, 503, 504)
_TEXT: Final[Schema] = {"type": "string"}
_FILE: Final[Schema] = {"type": "string", "contentMediaType": "application/octet-stream"}
_PICTURE: Final = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAG"
    "7buVgAAAABJRU5ErkJggg=="
)


def _events(data: Schema, *, ends: bool = True) -> Schema:
    """Each of the server-sent events; their data is JSON."""
    json = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    told = {"anyOf": [json, {"const": "[DONE]"}]} if ends else json
    return {"type": "object", "required": ["data"], "properties": {"data": told}}


def _or_error(chunk: str) -> Schema:
    return {"anyOf": [ref(chunk), ref("Error")]}


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Attributes:
        takes: by media type, the schema of the body; empty for none.
        gives: by media type, the schema of an answer with status 200.
        failures: other statuses, all with the schema of an error.
        examples: by name, bodies in JSON.
        unchanged: 304 is answered to who has it already.
    """

    method: str
    path: str
    name: str
    summary: str
    gives: Mapping[str, Schema]
    takes: Mapping[str, Schema] = field(default_factory=dict)
    failures: tuple[int, ...] = _READ
    parameters: tuple[Schema, ...] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)
    unchanged: bool = False


def _parameter(name: str, place: str, told: str, schema: Schema, **more: Any) -> Schema:
    return {"name": name, "in": place, "description": told, "schema": schema, **more}


_ID: Final = _parameter(
    "id", "path", "The name of a model; it may hold slashes.", _TEXT | {"minLength": 1},
    required=True,
)  # fmt: skip
_MODEL: Final = _parameter(
    "model", "query", "For a body of safetensors: the model; if absent, whatever is served.", _TEXT
)
_FILE_NAME: Final = _parameter("name", "path", "The name of a file.", _TEXT, required=True)

_PICTURES: Final[Schema] = {
    "description": "A picture: its URL, a part as in a chat, or an object with its URL or base64.",
    "anyOf": [
        {"type": "string"},
        ref("ImageUrlPart"),
        ref("ImageEmbedsPart"),
        {"type": "object", "properties": {"image": {"type": "string"}}, "required": ["image"]},
    ],
}
_ONE_OR_MORE: Final[Schema] = {
    "anyOf": [_PICTURES, {"type": "array", "minItems": 1, "items": _PICTURES}, {"type": "null"}]
}
_BOUNDS: Final[Schema] = {"anyOf": [ref("PixelBounds"), {"type": "null"}]}
HOLD: Final[Schema] = {
    "type": "object",
    "description": "Pictures under input or images, not both.",
    "properties": {
        "model": {"type": ["string", "null"], "description": "If absent, whatever is served."},
        "input": _ONE_OR_MORE,
        "images": _ONE_OR_MORE,
        "encoding_format": {"enum": ["reference", "base64", None], "default": "reference"},
        "dtype": {"enum": ["float32", "float16", "bfloat16", None]},
        "mm_processor_kwargs": _BOUNDS,
    },
    **one_of_two("input", "images"),
}
POOL: Final[Schema] = {
    "type": "object",
    "description": "Pictures under input, or a chat of one picture under messages, not both.",
    "properties": {
        "model": {"type": "string"},
        "input": _ONE_OR_MORE,
        "messages": {
            "anyOf": [
                {"type": "array", "minItems": 1, "items": ref("Message")},
                {"type": "null"},
            ]
        },
        "encoding_format": {"enum": ["float", "base64", None], "default": "float"},
        "dimensions": {"type": ["integer", "null"], "description": "The model's width only."},
        "mm_processor_kwargs": _BOUNDS,
    },
    "required": ["model"],
    **one_of_two("input", "messages"),
}
_HI: Final = [{"role": "user", "content": "Hello!"}]
_SEEN: Final = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": _PICTURE}},
    ],
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}

OPERATIONS: Final = (
    Operation(
        "post", "/v1/chat/completions", "createChatCompletion",
        "Answers a conversation with text and pictures.",
        {JSON: ref("ChatCompletion"), EVENTS: _events(_or_error("ChatCompletionChunk"))},
        {JSON: ref("ChatRequest")}, _BODY,
        examples={
            "text": {"model": "the-model", "messages": _HI, "temperature": 0},
            "a picture": {"model": "the-model", "messages": [_SEEN], "max_tokens": 32},
            "a stream": {
                "model": "the-model", "messages": _HI, "stream": True,
                "stream_options": {"include_usage": True},
            },
            "tools": {"model": "the-model", "messages": _HI, "tools": [_TOOL]},
        },
    ),
    Operation(
        "post", "/v1/responses", "createResponse",
        "Answers an input, by the name and in the form of OpenAI's Responses, without state.",
        {JSON: ref("Response"), EVENTS: _events(ref("ResponseEvent"), ends=False)},
        {JSON: ref("ResponsesRequest")}, _BODY,
        examples={"text": {"model": "the-model", "input": "Hello!"}},
    ),
    Operation(
        "post", "/v1/completions", "createCompletion",
        "Continues texts, without the chat template.",
        {JSON: ref("TextCompletion"), EVENTS: _events(_or_error("TextCompletionChunk"))},
        {JSON: ref("CompletionRequest")}, _BODY,
        examples={
            "one text": {"model": "the-model", "prompt": "Once upon a time"},
            "tokens": {"model": "the-model", "prompt": [[1, 2], [3]], "logprobs": 2},
        },
    ),
    Operation(
        "post", "/v1/embeddings", "createEmbedding",
        "One vector for each picture: the mean of its features, scaled to length 1.",
        {JSON: ref("Vectors")}, {JSON: POOL}, _BODY,
        examples={"a picture": {"model": "the-model", "input": [_PICTURE]}},
    ),
    Operation(
        "post", "/v1/image_embeddings", "holdImageEmbeddings",
        "Encodes pictures, holds their features for later requests, and sends them back if asked.",
        {JSON: ref("HeldEmbeddings"), MEDIA_TYPE: _FILE}, {JSON: HOLD, MEDIA_TYPE: _FILE}, _BODY,
        parameters=(_MODEL,),
        examples={"a picture": {"model": "the-model", "input": _PICTURE}},
    ),
    Operation(
        "post", "/tokenize", "tokenize",
        "The tokens of a prompt or of a conversation; pictures are measured, not encoded.",
        {JSON: ref("Tokenized")}, {JSON: ref("TokenizeRequest")}, _BODY,
        examples={
            "a text": {"prompt": "Hello!", "add_special_tokens": False},
            "a conversation": {"model": "the-model", "messages": [_SEEN]},
        },
    ),
    Operation(
        "post", "/detokenize", "detokenize", "The text of tokens.",
        {JSON: ref("Detokenized")}, {JSON: ref("DetokenizeRequest")}, _BODY,
        examples={"tokens": {"tokens": [72, 105]}},
    ),
    Operation(
        "get", "/v1/models", "listModels", "The model that is served.",
        {JSON: ref("ModelList")}, failures=(*_READ, 500, 503, 504),
    ),
    Operation(
        "get", "/v1/models/{id}", "getModel", "The model of that name, if it is served.",
        {JSON: ref("Model")}, failures=(*_READ, 404, 500, 503, 504), parameters=(_ID,),
    ),
    Operation("get", "/health", "getHealth", "Whether the process lives.", {JSON: ref("Health")},
              failures=()),
    Operation(
        "get", "/ready", "getReady", "Whether new requests are welcome.", {JSON: ref("Ready")},
        failures=(503,),
    ),
    Operation("get", "/version", "getVersion", "The version.", {JSON: ref("Version")}),
    Operation("get", "/metrics", "getMetrics", "Counts and times for Prometheus.",
              {"text/plain": _TEXT}),
    Operation("get", "/openapi.json", "getOpenApi", "This document.", {JSON: {"type": "object"}}),
    Operation("get", "/", "getPage", "A page to try the model.", {"text/html": _TEXT},
              unchanged=True),
    Operation(
        "get", "/page/{name}", "getPageFile", "A file of that page.",
        {"text/html": _TEXT, "text/css": _TEXT, "text/javascript": _TEXT, "image/svg+xml": _TEXT},
        failures=(*_READ, 404), parameters=(_FILE_NAME,), unchanged=True,
    ),
)  # fmt: skip
