"""What belongs to the call in hand and is not a field of its message."""

import re
import time
import uuid
from collections.abc import Iterable

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def accepted_request_id(claimed: str | None) -> str:
    """`claimed` if it is short and printable, else a new id: callers cannot inject into logs."""
    if claimed is not None and _REQUEST_ID.fullmatch(claimed):
        return claimed
    return f"req-{uuid.uuid4().hex}"


def value_of(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str | None:
    """The first text value of `key` in a call's metadata."""
    for name, value in metadata or ():
        if name == key and isinstance(value, str):
            return value
    return None


def seconds_left(deadline: float) -> float:
    """Seconds until `deadline` (time.monotonic); negative when it has passed."""
    return deadline - time.monotonic()
