"""A ChiasmError in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, all four."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from chiasm.errors import ChiasmError, Reason

# OpenAI's own names where it has one. `metadata["code"]` of an error, where given, is more exact.
CODES: Final[Mapping[Reason, str]] = {
    Reason.REQUEST_INVALID: "invalid_value",
    Reason.IMAGE_INVALID: "image_parse_error",
    Reason.IMAGE_TOO_LARGE: "image_too_large",
    Reason.TOO_MANY_IMAGES: "too_many_images",
    Reason.TENSOR_INVALID: "invalid_image_embeds",
    Reason.TENSOR_TOO_LARGE: "image_embeds_too_large",
    Reason.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    Reason.MODEL_NOT_FOUND: "model_not_found",
    Reason.ENCODER_MISMATCH: "encoder_mismatch",
    Reason.EMBEDDING_NOT_FOUND: "embedding_not_found",
    Reason.URL_FORBIDDEN: "invalid_image_url",
    Reason.URL_FETCH_FAILED: "failed_to_download_image",
    Reason.BODY_TOO_LARGE: "body_too_large",
    Reason.QUEUE_FULL: "queue_full",
    Reason.NOT_READY: "not_ready",
    Reason.NO_ENCODER: "no_encoder",
    Reason.DEADLINE: "deadline_exceeded",
    Reason.CANCELLED: "cancelled",
    Reason.UNAUTHENTICATED: "invalid_api_key",
    Reason.UNSUPPORTED: "unsupported_parameter",
    Reason.INTERNAL: "internal_error",
    Reason.CALLER_NOT_ALLOWED: "caller_not_allowed",
}
_TYPES: Final = {401: "authentication_error", 429: "rate_limit_error"}
_NO_CODE: Final = "null"
_NOT_ALLOWED: Final = (
    "The LLM service does not serve this gateway's certificate; whoever runs them must name it in "
    "the service's --mtls-clients."
)
_RETRY_SECONDS: Final = 1.0  # where the server gave no hint
# Clients retry every 5xx by themselves. Not these: a request that made the server fail, or that it
# could not answer in minutes, would do the same to the next replica.
_NEVER_AGAIN: Final = frozenset({Reason.INTERNAL, Reason.DEADLINE})
_BAD_GATEWAY: Final = 502  # parts that do not belong together: only the operator mends that
# Bytes of JSON; a body stays under 2 KB with both.
_MOST_MESSAGE: Final = 1200
_MOST_PARAM: Final = 400
_LONGEST_ESCAPE: Final = 12  # \ud83d\ude00
_CUT: Final = "..."


@dataclass(frozen=True)
class HttpError:
    """What goes on the wire."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]


def invalid(message: str, param: str | None, code: str | None = "invalid_value") -> ChiasmError:
    """A fault of the request's form. `code` None: OpenAI's null."""
    return ChiasmError(Reason.REQUEST_INVALID, message, param, metadata={"code": code or _NO_CODE})


def as_http(error: ChiasmError) -> HttpError:
    """Status, body and headers that tell `error`."""
    # The status that a translator found more exact than the table's: see `translate.told`.
    status = int(error.metadata.get("http_status", error.http_status))
    headers: dict[str, str] = {}
    if status in {429, 503}:
        wait = _RETRY_SECONDS if error.retry_after is None else error.retry_after
        headers["retry-after"] = str(max(1, math.ceil(wait)))
    if error.reason in _NEVER_AGAIN or status == _BAD_GATEWAY:
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(status, error_body(error, status), headers)


def error_body(error: ChiasmError, status: int | None = None) -> dict[str, Any]:
    """The JSON of `error`, for an answer or for an event in a stream."""
    code = error.metadata.get("code") or CODES[error.reason]
    # What the LLM service says of its caller is about this gateway, not about who reads it.
    ours = error.reason is Reason.CALLER_NOT_ALLOWED
    return _body(
        _NOT_ALLOWED if ours else error.message,
        _type_of(status or error.http_status),
        error.field,
        None if code == _NO_CODE else code,
    )


def plain_error(status: int, message: str, code: str | None) -> dict[str, Any]:
    """The JSON of a failure that HTTP itself knows, such as an unknown path."""
    return _body(message, _type_of(status), None, code)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    told = _clipped(message, _MOST_MESSAGE)
    place = None if param is None else _clipped(param, _MOST_PARAM)
    return {"error": {"message": told, "type": kind, "param": place, "code": code}}


def _clipped(text: str, most: int) -> str:
    """`text`, or its beginning, in at most `most` bytes of JSON."""
    if len(text) * _LONGEST_ESCAPE <= most or len(json.dumps(text)) <= most:
        return text
    kept = text[:most]
    while len(json.dumps(kept)) > most - len(_CUT):
        kept = kept[: len(kept) * 3 // 4]
    return kept + _CUT


def _type_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")
