"""What one key has used: a request's way in, what it sets aside, and what it took in the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from chiasm.errors import ChiasmError, Reason
from gateway.keys.limits import (
    Level,
    Limits,
    duration,
    full,
    refilled,
    seconds_until,
    taken,
    whole,
)

CODE: Final = "rate_limit_exceeded"
# A place is free when some answer ends; nobody knows when.
_PLACE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Refusal:
    """Which limit was reached, and the seconds after which it leaves room again."""

    limit: str
    seconds: float

    def error(self) -> ChiasmError:
        text = f"This API key has reached its limit of {self.limit}; try again shortly."
        return ChiasmError(
            Reason.QUEUE_FULL, text, retry_after=self.seconds, metadata={"code": CODE}
        )


class Allowance:
    """The levels of one key. Every call is told the time, in seconds of a monotonic clock."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._requests = full(limits.requests_per_minute or 0, now)
        self._tokens = full(limits.tokens_per_minute or 0, now)
        self._running = 0

    def change(self, limits: Limits, now: float) -> None:
        """Puts other limits in place; what was used stays used."""
        old = self._limits
        self._requests = _resized(
            self._requests, old.requests_per_minute, limits.requests_per_minute, now
        )
        self._tokens = _resized(self._tokens, old.tokens_per_minute, limits.tokens_per_minute, now)
        self._limits = limits

    def enter(self, now: float, *, spends: bool = True) -> Refusal | None:
        """Takes a request and a place, or nothing at all. Who got in calls `leave`.

        Args:
            spends: whether it may take tokens; it is then refused while tokens are owed.
        """
        refusal = self._no_place() or self._no_request(now)
        if refusal is None and spends:
            refusal = self._no_token(1, now)
        if refusal is None:
            self._running += 1
            self._requests = taken(self._requests, 1)
        return refusal

    def leave(self) -> None:
        self._running -= 1

    def set_aside(self, tokens: int, now: float) -> Refusal | None:
        """Takes `tokens`, a full bucket at most: whatever a request needs, it gets in some time."""
        limit = self._limits.tokens_per_minute
        if limit is None:
            return None
        refusal = self._no_token(min(tokens, limit), now)
        if refusal is None:
            self._tokens = taken(self._tokens, min(tokens, limit))
        return refusal

    def settle(self, aside: int, used: int, now: float) -> None:
        """Puts what was `used` in place of what was set `aside` for it."""
        limit = self._limits.tokens_per_minute
        if limit is not None:
            now_left = refilled(self._tokens, limit, now)
            self._tokens = taken(now_left, used - min(aside, limit))

    def headers(self, now: float) -> dict[str, str]:
        """The standard headers, of the limits that there are."""
        requests = _told("requests", self._requests, self._limits.requests_per_minute, now)
        return requests | _told("tokens", self._tokens, self._limits.tokens_per_minute, now)

    def _no_place(self) -> Refusal | None:
        most = self._limits.concurrent_requests
        if most is None or self._running < most:
            return None
        return Refusal(f"{most} requests at once", _PLACE_SECONDS)

    def _no_request(self, now: float) -> Refusal | None:
        limit = self._limits.requests_per_minute
        if limit is None:
            return None
        self._requests = refilled(self._requests, limit, now)
        wait = seconds_until(self._requests, limit, 1)
        return Refusal(f"{limit} requests a minute", wait) if wait > 0 else None

    def _no_token(self, count: int, now: float) -> Refusal | None:
        limit = self._limits.tokens_per_minute
        if limit is None:
            return None
        self._tokens = refilled(self._tokens, limit, now)
        wait = seconds_until(self._tokens, limit, count)
        return Refusal(f"{limit} tokens a minute", wait) if wait > 0 else None


class Charge:
    """One request's account with an allowance."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._aside = 0

    @contextmanager
    def running(self, *, spends: bool) -> Iterator[None]:
        """One request of the key while open. Raises QUEUE_FULL with code `rate_limit_exceeded`."""
        refusal = self._allowance.enter(time.monotonic(), spends=spends)
        if refusal is not None:
            raise refusal.error()
        try:
            yield
        finally:
            self._allowance.leave()

    def expect(self, tokens: int) -> None:
        """Sets aside what the request is thought to take; once a request. Raises as `running`."""
        refusal = self._allowance.set_aside(tokens, time.monotonic())
        if refusal is not None:
            raise refusal.error()
        self._aside = tokens

    def end(self, used: int | None) -> None:
        """Counts what was used; None where nobody knows: what was set aside then stays taken."""
        count = self._aside if used is None else used
        self._allowance.settle(self._aside, count, time.monotonic())

    def headers(self) -> dict[str, str]:
        return self._allowance.headers(time.monotonic())


def _resized(level: Level, old: int | None, new: int | None, now: float) -> Level:
    if new is None or old is None:
        return full(new or 0, now)
    if new == old:
        return level
    used = old - refilled(level, old, now).left
    return Level(float(new) - used, now)


def _told(name: str, level: Level, limit: int | None, now: float) -> dict[str, str]:
    if limit is None:
        return {}
    level = refilled(level, limit, now)
    return {
        f"x-ratelimit-limit-{name}": str(limit),
        f"x-ratelimit-remaining-{name}": str(whole(level)),
        f"x-ratelimit-reset-{name}": duration(seconds_until(level, limit, limit)),
    }
