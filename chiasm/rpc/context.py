"""What belongs to the call in hand and is not a field of its message."""

import re
import time
import uuid
from collections.abc import Iterable

from chiasm.tracing.spans import current_trace
from chiasm.tracing.w3c import TRACE_PARENT, TRACE_STATE, Trace, accepted

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def accepted_request_id(claimed: str | None) -> str:
    """`claimed` if it is short and printable, else a new id: callers cannot inject into logs."""
    if claimed is not None and _REQUEST_ID.fullmatch(claimed):
        return claimed
    return f"req-{uuid.uuid4().hex}"


def traced(metadata: tuple[tuple[str, str | bytes], ...]) -> tuple[tuple[str, str | bytes], ...]:
    """`metadata` of a call that is made now, with the trace that it belongs to, if any."""
    return (*metadata, *current_trace().headers())


def caller_trace(metadata: Iterable[tuple[str, str | bytes]] | None) -> Trace:
    """The trace that a call's caller is in, by its metadata."""
    found: dict[str, list[str]] = {TRACE_PARENT: [], TRACE_STATE: []}
    for name, value in metadata or ():
        if name in found and isinstance(value, str):
            found[name].append(value)
    return accepted(found[TRACE_PARENT], found[TRACE_STATE])


def value_of(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str | None:
    """The first text value of `key` in a call's metadata."""
    for name, value in metadata or ():
        if name == key and isinstance(value, str):
            return value
    return None


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline` (time.monotonic); negative when it has passed."""
    return deadline - time.monotonic()
