"""How an accepted request is answered: in one piece, or as a stream of events."""

import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http.body import unless_gone
from gateway.http.events import EventStream
from gateway.http.observed import exchange_of
from gateway.http.timing import server_timing
from gateway.openai.answer import Json, stages_of


def as_stream(
    request: Request, events: AsyncGenerator[bytes, None], keep_alive_seconds: float
) -> Response:
    """The events, after a head that tells how long the request waited to be accepted."""
    waited = (time.monotonic() - exchange_of(request.scope).began) * 1000
    head = server_timing({"accept": waited})
    return EventStream(events, head, keep_alive_seconds=keep_alive_seconds)


async def as_whole(request: Request, gathered: Coroutine[Any, Any, Json]) -> Response:
    """The body, with the times of its stages in the head. Raises CANCELLED if the caller left."""
    body = await unless_gone(request.receive, gathered)
    return JSONResponse(body, headers=server_timing(stages_of(body)))
