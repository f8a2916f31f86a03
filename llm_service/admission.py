"""Admission before work: a permit an answer, and an error with a retry hint beyond the limit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chiasm.errors import ChiasmError, Reason

_RETRY_SECONDS = 1.0


class Permits:
    """At most `limit` answers at once. Used on the event loop only."""

    def __init__(self, limit: int, on_refusal: Callable[[], None]) -> None:
        self._limit = limit
        self._on_refusal = on_refusal
        self.held = 0

    @contextmanager
    def hold(self, count: int = 1) -> Iterator[None]:
        """`count` permits for the time inside.

        Raises QUEUE_FULL if fewer are left, and REQUEST_INVALID if there never were so many.
        """
        if count > self._limit:
            raise ChiasmError(
                Reason.REQUEST_INVALID,
                f"The service takes at most {self._limit} answers at once, but {count} choices "
                "were asked for.",
                "sampling.choice_count",
            )
        if self.held + count > self._limit:
            self._on_refusal()
            raise ChiasmError(
                Reason.QUEUE_FULL,
                f"The service has {self.held} of {self._limit} answers in hand; try again.",
                retry_after=_RETRY_SECONDS,
            )
        self.held += count
        try:
            yield
        finally:
            self.held -= count
