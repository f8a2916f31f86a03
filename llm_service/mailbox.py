"""Carries an engine's events from its thread to one waiting call on the event loop."""

import asyncio
import threading
from collections import deque

from llm_service.engine.values import Event


class Mailbox:
    """Events of one request. `put` may be called from any thread and never blocks.

    The loop is woken once for all events that gathered since the last `take`, however many.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        with self._lock:
            wake = not self._events
            self._events.append(event)
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:
                # The loop is closed, so nobody waits any more.
                return

    async def take(self) -> list[Event]:
        """All events that have come; waits for the first."""
        await self._arrived.wait()
        with self._lock:
            events = list(self._events)
            self._events.clear()
            self._arrived.clear()
        return events
