"""Reasons of failure, and the one table that maps each to gRPC and HTTP.

    ChiasmError                      what every part raises and every client receives
      .reason    Reason              machine-readable, the same on every wire
      .message   str                 for a person: which field, what was found, how to mend it
      .field     str | None          path of the field at fault, for instance
                                     `messages[0].parts[1].embedding.features`
      .retry_after  float | None     seconds after which a later try may help

Only the message that the raiser wrote reaches a caller; the text of a foreign exception never does.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "chiasm"
INTERNAL_TEXT = "The server failed; its log holds the detail beside the request id."
# gRPC refuses metadata above 8 KiB, and the details travel there.
_MESSAGE_LIMIT = 1000


class Reason(StrEnum):
    """Why a call failed; the members of `chiasm.v1.ErrorReason` without their prefix."""

    REQUEST_INVALID = "REQUEST_INVALID"
    IMAGE_INVALID = "IMAGE_INVALID"
    IMAGE_TOO_LARGE = "IMAGE_TOO_LARGE"
    TOO_MANY_IMAGES = "TOO_MANY_IMAGES"
    TENSOR_INVALID = "TENSOR_INVALID"
    TENSOR_TOO_LARGE = "TENSOR_TOO_LARGE"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    ENCODER_MISMATCH = "ENCODER_MISMATCH"
    EMBEDDING_NOT_FOUND = "EMBEDDING_NOT_FOUND"
    URL_FORBIDDEN = "URL_FORBIDDEN"
    URL_FETCH_FAILED = "URL_FETCH_FAILED"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    QUEUE_FULL = "QUEUE_FULL"
    NOT_READY = "NOT_READY"
    NO_ENCODER = "NO_ENCODER"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    UNSUPPORTED = "UNSUPPORTED"
    INTERNAL = "INTERNAL"
    CALLER_NOT_ALLOWED = "CALLER_NOT_ALLOWED"


def sentence(text: str) -> str:
    """`text` with a capital and a full stop, as all messages to callers have."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


@dataclass(frozen=True)
class Outcome:
    """How one reason is told: its gRPC status and its HTTP status."""

    grpc: grpc.StatusCode
    http: int


_C = grpc.StatusCode
TABLE: Mapping[Reason, Outcome] = {
    Reason.REQUEST_INVALID: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.IMAGE_INVALID: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.IMAGE_TOO_LARGE: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.TOO_MANY_IMAGES: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.TENSOR_INVALID: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.TENSOR_TOO_LARGE: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.CONTEXT_LENGTH_EXCEEDED: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.MODEL_NOT_FOUND: Outcome(_C.NOT_FOUND, 404),
    Reason.ENCODER_MISMATCH: Outcome(_C.FAILED_PRECONDITION, 400),
    Reason.EMBEDDING_NOT_FOUND: Outcome(_C.NOT_FOUND, 400),
    Reason.URL_FORBIDDEN: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.URL_FETCH_FAILED: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.BODY_TOO_LARGE: Outcome(_C.RESOURCE_EXHAUSTED, 413),
    Reason.QUEUE_FULL: Outcome(_C.RESOURCE_EXHAUSTED, 429),
    Reason.NOT_READY: Outcome(_C.UNAVAILABLE, 503),
    Reason.NO_ENCODER: Outcome(_C.UNAVAILABLE, 503),
    Reason.DEADLINE: Outcome(_C.DEADLINE_EXCEEDED, 504),
    Reason.CANCELLED: Outcome(_C.CANCELLED, 499),
    Reason.UNAUTHENTICATED: Outcome(_C.UNAUTHENTICATED, 401),
    Reason.UNSUPPORTED: Outcome(_C.INVALID_ARGUMENT, 400),
    Reason.INTERNAL: Outcome(_C.INTERNAL, 500),
    # Over HTTP it is the gateway that may not call: parts that do not belong together.
    Reason.CALLER_NOT_ALLOWED: Outcome(_C.PERMISSION_DENIED, 502),
}

# A status without our details comes from gRPC itself, from a proxy, or from a dead peer.
_REASON_OF_BARE_STATUS: Mapping[grpc.StatusCode, tuple[Reason, str]] = {
    _C.INVALID_ARGUMENT: (Reason.REQUEST_INVALID, "The service refused the request."),
    _C.UNAVAILABLE: (Reason.NOT_READY, "The service cannot be reached; try again later."),
    _C.DEADLINE_EXCEEDED: (Reason.DEADLINE, "The deadline passed before an answer was ready."),
    _C.CANCELLED: (Reason.CANCELLED, "The call was cancelled."),
    _C.UNAUTHENTICATED: (Reason.UNAUTHENTICATED, "The service needs credentials."),
    _C.RESOURCE_EXHAUSTED: (
        Reason.BODY_TOO_LARGE,
        "The message exceeds the largest that the service accepts; send less in one request.",
    ),
}


# What gRPC says where our own end of TLS refused the service's.
_UNTRUSTED = re.compile(r"tls handshake failed|verification check failed|verify_failed", re.I)
_UNTRUSTED_TEXT = (
    "The service shows no certificate that comes from a trusted authority and has an expected name."
)


class ChiasmError(Exception):
    """A failure that a caller is told about. See the module's docstring for the attributes."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        field: str | None = None,
        retry_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.metadata = dict(metadata or {})

    def __str__(self) -> str:
        place = f" ({self.field})" if self.field else ""
        return f"{self.reason}{place}: {self.message}"

    @property
    def grpc_code(self) -> grpc.StatusCode:
        return TABLE[self.reason].grpc

    @property
    def http_status(self) -> int:
        return TABLE[self.reason].http

    def within(self, place: str) -> "ChiasmError":
        """The same failure, with its field inside `place` (`place` itself if it had none)."""
        path = f"{place}.{self.field}" if self.field else place
        return ChiasmError(self.reason, self.message, path, self.retry_after, self.metadata)


@contextmanager
def within(place: str) -> Iterator[None]:
    """Prefixes the field of every ChiasmError raised inside with `place`."""
    try:
        yield
    except ChiasmError as error:
        raise error.within(place) from error.__cause__


def to_status(error: ChiasmError) -> status_pb2.Status:
    """The google.rpc.Status that carries `error`: ErrorInfo, and BadRequest or RetryInfo."""
    message = error.message[:_MESSAGE_LIMIT]
    status = status_pb2.Status(code=error.grpc_code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.value, domain=DOMAIN, metadata=dict(error.metadata)
    )
    _pack(status, info)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field[:_MESSAGE_LIMIT], description=message
        )
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(max(1, int(error.retry_after * 1000)))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_rpc_error(error: grpc.RpcError) -> ChiasmError:
    """The ChiasmError behind a failed call, from its details or else from its bare status."""
    code: grpc.StatusCode = error.code()
    status = _status_of(error)
    if status is not None:
        told = _from_status(status)
        if told is not None:
            return told
    reason, message = _REASON_OF_BARE_STATUS.get(code, (Reason.INTERNAL, INTERNAL_TEXT))
    if code is _C.UNAVAILABLE and _UNTRUSTED.search(error.details() or ""):
        message = _UNTRUSTED_TEXT
    return ChiasmError(reason, message)


def _status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(error)
    except ValueError:  # details that contradict the status: not ours
        return None


def _from_status(status: status_pb2.Status) -> ChiasmError | None:
    found = _Details.read(status)
    if found.info is None or found.info.domain != DOMAIN:
        return None
    try:
        reason = Reason(found.info.reason)
    except ValueError:  # a newer server's reason: its status still says the kind
        return None
    return ChiasmError(
        reason, status.message, found.place, found.retry_after, dict(found.info.metadata)
    )


@dataclass
class _Details:
    info: Any = None
    place: str | None = None
    retry_after: float | None = None

    @classmethod
    def read(cls, status: status_pb2.Status) -> "_Details":
        found = cls()
        for detail in status.details:
            found._take(detail)
        return found

    def _take(self, detail: any_pb2.Any) -> None:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            self.info = info
        elif detail.Unpack(bad) and bad.field_violations:
            self.place = bad.field_violations[0].field
        elif detail.Unpack(retry):
            self.retry_after = retry.retry_delay.ToMilliseconds() / 1000


def _pack(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)
