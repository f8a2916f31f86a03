"""The document, for the routes that an application has."""

from collections.abc import Collection, Mapping
from typing import Any, Final

import chiasm
from gateway.openapi.operations import EVENTS, JSON, OPERATIONS, Operation
from gateway.openapi.schemas import Schema, answer_schemas, ref, request_schemas

_KEY: Final = "bearer"
_STATUSES: Final[Mapping[int, str]] = {
    400: "The request is wrong; `param` says where.",
    401: "The key is missing or wrong.",
    404: "There is no such model or file.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests, or the key's limits are reached; Retry-After says when to try again.",
    500: "The server failed.",
    502: "The deployment is wrong: its parts do not belong together.",
    503: "A part of the deployment is not ready; Retry-After says when to try again.",
    504: "The answer was not ready in time.",
}
_WAIT: Final = frozenset({429, 503})
_REQUEST_ID: Final[Schema] = {
    "description": "The id under which the server's logs know the request.",
    "schema": {"type": "string"},
    "required": True,
}
_RETRY: Final[Schema] = {
    "description": "Seconds to wait.",
    "schema": {"type": "integer", "minimum": 1},
    "required": True,
}
_STREAMS: Final = (
    " With `stream` true, server-sent events; a failure on the way is an event whose data is an "
    "error, and no choice is finished after it."
)


def document(
    paths: Collection[str], *, locked: bool, open_paths: Collection[str] = ()
) -> dict[str, Any]:
    """The document as JSON.

    Args:
        paths: of the application's routes; others are left out.
        locked: whether a key is needed, except for `open_paths`.
    """
    told: dict[str, Any] = {}
    for one in OPERATIONS:
        if one.path in paths:
            needs_key = locked and not _is_open(one.path, open_paths)
            told.setdefault(one.path, {})[one.method] = _operation(one, needs_key)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "Chiasm",
            "version": chiasm.__version__,
            "description": "An OpenAI server for vision-language models. Null is the same as "
            "absent; fields that are not named here are ignored, or refused by name where silence "
            "would lie. GET takes HEAD too.",
        },
        "paths": told,
        "components": {
            "schemas": dict(sorted((request_schemas() | answer_schemas()).items())),
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _is_open(path: str, open_paths: Collection[str]) -> bool:
    return any(path == one or (one.endswith("/") and one != "/" and path.startswith(one))
               for one in open_paths)  # fmt: skip


def _operation(one: Operation, needs_key: bool) -> Schema:
    told: Schema = {
        "operationId": one.name,
        "summary": one.summary,
        "responses": {"200": _success(one)} | _failures(one),
    }
    if one.unchanged:
        told["responses"]["304"] = {"description": "Unchanged.", "headers": _headers(304)}
    if one.parameters:
        told["parameters"] = list(one.parameters)
    if one.takes:
        told["requestBody"] = {"required": True, "content": _content(one)}
    told["security"] = [{_KEY: []}] if needs_key else []
    return told


def _content(one: Operation) -> Schema:
    content: Schema = {media: {"schema": schema} for media, schema in one.takes.items()}
    if one.examples:
        content[JSON]["examples"] = {name: {"value": it} for name, it in one.examples.items()}
    return content


def _success(one: Operation) -> Schema:
    return {
        "description": one.summary + (_STREAMS if EVENTS in one.gives else ""),
        "headers": _headers(200),
        "content": {media: {"schema": schema} for media, schema in one.gives.items()},
    }


def _failures(one: Operation) -> Schema:
    return {
        str(status): {
            "description": _STATUSES[status],
            "headers": _headers(status),
            "content": {JSON: {"schema": ref("Error")}},
        }
        for status in sorted(one.failures)
    }


def _headers(status: int) -> Schema:
    always = {"x-request-id": _REQUEST_ID}
    return always | {"retry-after": _RETRY} if status in _WAIT else always
