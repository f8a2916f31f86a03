"""Request bodies within limits, and callers that leave."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from chiasm.errors import ChiasmError, Reason
from gateway.http.depth import nests_deeper, opens_more
from gateway.http.observed import exchange_of
from gateway.openai.errors import invalid

T = TypeVar("T")
_GONE: Final = ChiasmError(Reason.CANCELLED, "The caller left.")
# Bytes that are joined and whose brackets are counted within a millisecond; more are so beside the
# event loop.
_SCANNED_AT_ONCE: Final = 1 << 20
_COUNTED_AT_ONCE: Final = 4096  # opening brackets
_SMALL_PIECE: Final = 1 << 12
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


async def read_body(request: Request, limit: int, lease: Lease, *, json: bool = True) -> bytearray:
    """The whole body, at most `limit` bytes.

    Raises BODY_TOO_LARGE (from Content-Length before anything is read, else while reading),
    REQUEST_INVALID with HTTP status 415 for a compressed body, CANCELLED if the caller left, and
    for a body of `json` REQUEST_INVALID if it nests too deeply.
    """
    _check_encoding(request.headers.get("content-encoding", ""))
    stated = request.headers.get("content-length", "0")
    # The server's parser has refused anything but digits.
    _check_size(int(stated) if stated.isdecimal() else 0, limit)
    body = await _whole(request.receive, limit, lease)
    if json:
        await _check_depth(body, exchange_of(request.scope).max_json_depth)
    return body


async def _whole(receive: Receive, limit: int, lease: Lease) -> bytearray:
    """The pieces of a body as they come, joined once: a body that grows is copied many times."""
    pieces, count, more = [b""], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _gone()
        piece: bytes = message.get("body", b"")
        count += len(piece)
        _check_size(count, limit)
        lease.take(len(piece))
        if len(pieces[-1]) < _SMALL_PIECE:  # a list of single bytes would weigh forty times as much
            pieces[-1] += piece
        else:
            pieces.append(piece)
        more = message.get("more_body", False)
    if count > _SCANNED_AT_ONCE:
        return await asyncio.to_thread(bytearray().join, pieces)
    return bytearray().join(pieces)


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


async def _check_depth(body: bytearray, limit: int) -> None:
    many = len(body) > _SCANNED_AT_ONCE or opens_more(body, _COUNTED_AT_ONCE)
    deep = await asyncio.to_thread(nests_deeper, body, limit) if many else nests_deeper(body, limit)
    if deep:
        text = f"The body nests arrays and objects more than {limit} deep, the limit here."
        raise invalid(text, None, "invalid_json")


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in _ENCODINGS:
        error = invalid("Compressed bodies are not read; send the JSON as it is.", None, None)
        error.metadata["http_status"] = "415"
        error.metadata["code"] = "unsupported_content_encoding"
        raise error
