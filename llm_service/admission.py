"""Admission before work: a permit a request, and an error with a retry hint beyond the limit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chiasm.errors import ChiasmError, Reason

_RETRY_SECONDS = 1.0


class Permits:
    """At most `limit` requests at once. Used on the event loop only."""

    def __init__(self, limit: int, on_refusal: Callable[[], None]) -> None:
        self._limit = limit
        self._on_refusal = on_refusal
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A permit for the time inside. Raises QUEUE_FULL if all are held."""
        if self.held >= self._limit:
            self._on_refusal()
            raise ChiasmError(
                Reason.QUEUE_FULL,
                f"The service has {self._limit} requests in hand; try again.",
                retry_after=_RETRY_SECONDS,
            )
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
