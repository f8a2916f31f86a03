"""How much a key may ask for. Pure: levels are values, and time (seconds, monotonic) is passed in.

A bucket holds a minute's worth and fills evenly. In any stretch of `t` seconds it gives at most
`capacity * (1 + t / 60)`. A level may lie below zero: what an answer took beyond what was set aside
for it is owed, and nothing is given until that is made up.
"""

import math
from dataclasses import dataclass
from typing import Final

MINUTE: Final = 60.0


@dataclass(frozen=True)
class Limits:
    """The bounds of one key; None bounds nothing."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True)
class Level:
    """What was `left` of a bucket at the time `at`."""

    left: float
    at: float


def full(capacity: int, now: float) -> Level:
    return Level(float(capacity), now)


def refilled(level: Level, capacity: int, now: float) -> Level:
    """`level` as it is at `now`; a clock that goes back adds nothing."""
    gained = max(0.0, now - level.at) * capacity / MINUTE
    return Level(min(float(capacity), level.left + gained), max(now, level.at))


def taken(level: Level, count: float) -> Level:
    """`level` without `count`; a negative count gives back."""
    return Level(level.left - count, level.at)


def seconds_until(level: Level, capacity: int, wanted: float) -> float:
    """Seconds from `level.at` until `wanted` are left, 0 if they are. `wanted` <= `capacity`."""
    return max(0.0, wanted - level.left) * MINUTE / capacity


def whole(level: Level) -> int:
    """What is left, as it is told: whole units, none below zero."""
    # A bucket that was filled to the brim by halves and thirds counts as full.
    return max(0, math.floor(level.left + 1e-6))


def duration(seconds: float) -> str:
    """`seconds` as the rate-limit headers have it: `6m0s`, `1.5s`, `17ms`; 0 is `0s`."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    told = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{told}"
    return f"{minutes}m{told}" if minutes else told
