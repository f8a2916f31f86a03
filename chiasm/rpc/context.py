"""What belongs to the call in hand and is not a field of its message."""

import re
import time
import uuid
from collections.abc import Iterable
from contextvars import ContextVar

from chiasm.rpc import limits

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header; later versions may go on after a dash.
_TRACE_PARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}"
    r"-[0-9a-f]{2}(?P<more>-[\x20-\x7e]{0,200})?"
)

# The trace that the work in hand belongs to, as its caller named it; empty: none.
TRACE_PARENT: ContextVar[str] = ContextVar("chiasm_trace_parent", default="")


def accepted_request_id(claimed: str | None) -> str:
    """`claimed` if it is short and printable, else a new id: callers cannot inject into logs."""
    if claimed is not None and _REQUEST_ID.fullmatch(claimed):
        return claimed
    return f"req-{uuid.uuid4().hex}"


def accepted_trace_parent(claimed: str | None) -> str:
    """`claimed` if it is a W3C traceparent, else nothing, as the standard wants it."""
    found = _TRACE_PARENT.fullmatch(claimed or "")
    return found[0] if found and not (found["version"] == "00" and found["more"]) else ""


def trace_of(trace_parent: str) -> str:
    """The id of the trace within an accepted traceparent."""
    return trace_parent.split("-")[1]


def traced(metadata: tuple[tuple[str, str | bytes], ...]) -> tuple[tuple[str, str | bytes], ...]:
    """`metadata` of a call that is made now, with the trace that it belongs to, if any."""
    trace_parent = TRACE_PARENT.get()
    return (*metadata, (limits.TRACE_PARENT, trace_parent)) if trace_parent else metadata


def value_of(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str | None:
    """The first text value of `key` in a call's metadata."""
    for name, value in metadata or ():
        if name == key and isinstance(value, str):
            return value
    return None


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline` (time.monotonic); negative when it has passed."""
    return deadline - time.monotonic()
