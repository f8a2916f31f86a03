"""Request bodies within limits, and callers that leave."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from chiasm.errors import ChiasmError, Reason
from gateway.openai.errors import invalid

T = TypeVar("T")
_GONE: Final = ChiasmError(Reason.CANCELLED, "The caller left.")
_ENCODINGS: Final = frozenset({"", "identity"})


class BodyBudget:
    """Bytes of all bodies in hand together, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    @contextmanager
    def lease(self) -> Iterator["Lease"]:
        """Room for one body; what it took is free again at the end."""
        lease = Lease(self)
        try:
            yield lease
        finally:
            lease.end()

    def take(self, count: int) -> None:
        """Raises QUEUE_FULL if the bodies in hand leave no room for `count` bytes more."""
        if self.held + count > self._limit:
            text = "The gateway holds as many request bodies as it may; try again shortly."
            raise ChiasmError(Reason.QUEUE_FULL, text, retry_after=1.0)
        self.held += count


class Lease:
    """What one request has taken of a budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._count = 0

    def take(self, count: int) -> None:
        self._budget.take(count)
        self._count += count

    def end(self) -> None:
        """Gives back all; what comes after a second call changes nothing."""
        self._budget.held -= self._count
        self._count = 0


async def read_body(request: Request, limit: int, lease: Lease) -> bytearray:
    """The whole body, at most `limit` bytes.

    Raises BODY_TOO_LARGE (from Content-Length before anything is read, else while reading),
    REQUEST_INVALID with HTTP status 415 for a compressed body, CANCELLED if the caller left.
    """
    _check_encoding(request.headers.get("content-encoding", ""))
    stated = request.headers.get("content-length", "0")
    # The server's parser has refused anything but digits.
    _check_size(int(stated) if stated.isdecimal() else 0, limit)
    body = bytearray()
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise _gone()
        chunk: bytes = message.get("body", b"")
        _check_size(len(body) + len(chunk), limit)
        lease.take(len(chunk))
        body += chunk
        more = message.get("more_body", False)
    return body


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; if the caller leaves before, `work` is cancelled and CANCELLED raised.

    Call it when the body has been read: what still comes then is the caller's leaving.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _gone()
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _gone() -> ChiasmError:
    return ChiasmError(_GONE.reason, _GONE.message)


def _check_size(count: int, limit: int) -> None:
    if count > limit:
        text = f"The body has more than {limit} bytes, the limit here; send less in one request."
        raise ChiasmError(Reason.BODY_TOO_LARGE, text)


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in _ENCODINGS:
        error = invalid("Compressed bodies are not read; send the JSON as it is.", None, None)
        error.metadata["http_status"] = "415"
        error.metadata["code"] = "unsupported_content_encoding"
        raise error
