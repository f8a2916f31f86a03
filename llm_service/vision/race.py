"""Two attempts at one thing, the second begun when the first is late."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def first_good(
    first: Coroutine[Any, Any, T],
    late: float,
    second: Callable[[], Coroutine[Any, Any, T] | None],
) -> T:
    """The first result of `first` and, begun after `late` seconds, `second()`; cancels the other.

    Raises what the last of them to fail raised.
    """
    running = {asyncio.ensure_future(first)}
    try:
        done, _ = await asyncio.wait(running, timeout=late)
        if not done and (other := second()) is not None:
            running.add(asyncio.ensure_future(other))
        return await _first_result(running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _first_result(running: set["asyncio.Task[T]"]) -> T:
    waiting = set(running)
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        good = [task for task in done if task.exception() is None]
        if good or not waiting:
            return (good or list(done))[0].result()
