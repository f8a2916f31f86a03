"""Starts parts of a system again when they die, ever more slowly while they keep dying."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from chiasm.cli.part import Part

Show = Callable[[str], None]
# A process that ends so was told something that it cannot do: no restart mends it.
WRONG_SETTING: Final = 2


@dataclass(frozen=True)
class Backoff:
    """Seconds to wait before a restart: twice as long each time, until a part has lived long."""

    first: float = 0.5
    longest: float = 30.0
    long_life: float = 60.0

    def delay(self, failures: int) -> float:
        """Before the restart after so many failures in a row, the first counted as 1."""
        return min(self.first * 2.0 ** min(failures - 1, 30), self.longest)


DEFAULT_BACKOFF: Final = Backoff()


class Keeper:
    """Keeps the parts of a list alive, each in its own place.

    `obituary(part)` tells how a part ended, `show` gets a line for each change. A restarted part
    has `ready` seconds to say that it is ready, or it is killed and counts as dead again.
    """

    def __init__(
        self,
        parts: list[Part],
        obituary: Callable[[Part], str],
        ready: float,
        show: Show,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        self._parts, self._obituary, self._ready = parts, obituary, ready
        self._show, self._backoff = show, backoff

    async def keep(self) -> Part:
        """Restarts whatever dies; returns the first part that no restart mends."""
        places = [asyncio.create_task(self._keep_one(place)) for place in range(len(self._parts))]
        try:
            done, _ = await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in places:
                task.cancel()
            await asyncio.gather(*places, return_exceptions=True)

    async def _keep_one(self, place: int) -> Part:
        failures, born = 0, time.monotonic()
        while await self._parts[place].ended() != WRONG_SETTING:
            dead = self._parts[place]
            lived = time.monotonic() - born
            failures = 1 if lived >= self._backoff.long_life else failures + 1
            delay = self._backoff.delay(failures)
            self._show(f"{self._obituary(dead)}\n{dead.name:<12}starting again in {delay:g} s")
            # Whatever it had started goes too.
            await dead.gone(0)
            await asyncio.sleep(delay)
            born = time.monotonic()
            self._parts[place] = part = Part(dead.command, dead.sink)
            await part.start()
            await self._await_ready(part)
        return self._parts[place]

    async def _await_ready(self, part: Part) -> None:
        ready, ended = asyncio.create_task(part.ready()), asyncio.create_task(part.ended())
        tasks: Sequence[asyncio.Task[float] | asyncio.Task[int]] = (ready, ended)
        try:
            await asyncio.wait(tasks, timeout=self._ready, return_when=asyncio.FIRST_COMPLETED)
            if part.is_ready:
                self._show(f"{part.name:<12}ready again in {await ready:.1f} s")
            elif part.exit_code is None:
                self._show(f"{part.name:<12}not ready within {self._ready:g} s, killed")
                part.kill()
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
