"""Whether an encoder may be asked. Pure: the time is passed in, in seconds of time.monotonic.

    unknown --probe--> ready --fault--> ejected --probe, once its term is over--> ready
                         \\--other identity--> foreign --probe with the right one--> ready

An encoder that cannot be reached is back with the first probe that it answers. One that answers
wrongly or slowly would pass any probe, so it serves a term, longer each time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Literal

State = Literal["unknown", "ready", "ejected", "foreign"]


class Cause(StrEnum):
    """Why an encoder is not asked any more."""

    UNREACHABLE = "unreachable"
    SILENT = "silent"
    LYING = "lying"
    FAILING = "failing"
    SLOW = "slow"
    FOREIGN = "foreign"


# Faults that a probe does not show, with the length of the first term in seconds.
_TERMS = {Cause.LYING: 30.0, Cause.FAILING: 5.0, Cause.SLOW: 10.0}
_LONGEST_TERM = 600.0
# Answers in a row that wipe out earlier terms.
_REDEEMED_AFTER = 50
# Failures of its own in a row for which an encoder is ejected.
_FAILURES = 3
# Seconds between probes of an encoder that does not answer: from the first to the longest.
_SOONEST_PROBE, _LATEST_PROBE = 0.1, 2.0
# An encoder is slow if it takes this many times as long for a row as the others' median does...
_SLOW_RATIO = 5.0
# ... over this many of the last answers, and by at least this many seconds an answer.
_SAMPLES = 16
_SLOW_SECONDS = 0.25
# At most this share of the fleet is ejected for slowness at a time.
_SLOW_SHARE = 1 / 3


@dataclass(frozen=True)
class Answer:
    """How long an answer took in seconds, and the rows that the encoder owed then, its own too."""

    seconds: float
    rows: int


class Standing:
    """What is known of one encoder."""

    def __init__(self) -> None:
        self.state: State = "unknown"
        self.cause: Cause | None = None
        # time.monotonic() at which a probe made it ready.
        self.proved_at = 0.0
        # Medians over the last answers: seconds, and seconds for a row owed. None before there are
        # enough.
        self.seconds: float | None = None
        self.pace: float | None = None
        self._answers: deque[Answer] = deque(maxlen=_SAMPLES)
        self._free_at = 0.0
        self._terms = 0
        self._failures = 0
        self._good = 0
        self._missed_probes = 0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def last_resort(self) -> bool:
        """Whether it may be asked when no encoder is ready: it answers, and answers are checked."""
        return self.state == "ejected" and self.cause in _TERMS

    def answered(self, answer: Answer) -> None:
        """A good answer came."""
        self._answers.append(answer)
        if len(self._answers) == _SAMPLES:
            self.seconds = median(one.seconds for one in self._answers)
            self.pace = median(one.seconds / max(1, one.rows) for one in self._answers)
        self._failures = 0
        self._good += 1
        if self._good >= _REDEEMED_AFTER:
            self._terms = 0

    def failed(self, now: float) -> bool:
        """The encoder reported a failure of its own; returns whether that ejects it."""
        self._failures += 1
        return self._failures >= _FAILURES and self.eject(Cause.FAILING, now)

    def eject(self, cause: Cause, now: float) -> bool:
        """Asks it no more, for `cause`; returns whether that is news."""
        newly = self.ready or self.state == "unknown"
        # A term is served to its end, whatever else fails meanwhile.
        if not newly and now < self._free_at:
            return False
        self.state = "foreign" if cause is Cause.FOREIGN else "ejected"
        self.cause = cause
        self._good = self._failures = 0
        self._answers.clear()
        self.seconds = self.pace = None
        if cause in _TERMS:
            self._free_at = now + min(_LONGEST_TERM, _TERMS[cause] * 2**self._terms)
            self._terms += 1
        return newly

    def proved(self, now: float) -> bool:
        """A probe found it alive and of the right identity; returns whether it is back by that."""
        self._missed_probes = 0
        if self.ready or now < self._free_at:
            return False
        self.state, self.cause, self.proved_at = "ready", None, now
        return True

    def probe_failed(self) -> None:
        self._missed_probes += 1

    def until_probe(self, calm: float) -> float:
        """Seconds until the next probe; `calm` is the interval while all is well."""
        if self.ready:
            return calm
        return min(_LATEST_PROBE, _SOONEST_PROBE * 2.0 ** min(self._missed_probes, 16))


def too_slow(standing: Standing, fleet: Sequence[Standing]) -> bool:
    """Whether an encoder is so much slower than the rest that it should be ejected.

    Time is compared by row owed, so that an encoder with more work is not called slow for it.
    """
    if standing.pace is None or standing.seconds is None or not standing.ready:
        return False
    paces = [one.pace for one in fleet if one is not standing and one.pace is not None]
    slow = sum(one.cause is Cause.SLOW for one in fleet)
    if not paces or slow + 1 > _SLOW_SHARE * len(fleet):
        return False
    excess = 1 - median(paces) / standing.pace
    return excess > 1 - 1 / _SLOW_RATIO and standing.seconds * excess > _SLOW_SECONDS
