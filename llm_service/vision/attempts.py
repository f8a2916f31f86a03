"""How often and when a picture is asked for again, and what a caller is told in the end. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from chiasm.errors import ChiasmError, Reason
from llm_service.vision.standing import Cause

RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Judgement:
    """What the failure of an attempt means.

    Attributes:
        elsewhere: another encoder may answer.
        label: of the metric that counts how attempts end.
        cause: why this encoder is not asked any more; None if it is no fault of its.
        counted: a failure of its own, for which it is ejected if they go on.
    """

    elsewhere: bool
    label: str
    cause: Cause | None = None
    counted: bool = False


_OF_THE_PICTURE = frozenset(
    {Reason.IMAGE_INVALID, Reason.IMAGE_TOO_LARGE, Reason.REQUEST_INVALID, Reason.UNSUPPORTED}
)
# How often one picture may meet a full queue: once by chance, twice because the fleet is full.
_FULL_ATTEMPTS = 2


class Lie(Exception):
    """An answer that breaks the contract; `told` says how."""

    def __init__(self, told: ChiasmError) -> None:
        super().__init__(str(told))
        self.told = told


class Silence(Exception):
    """The encoder did not answer within the time that an attempt has."""

    def __str__(self) -> str:
        return "no answer to a picture in the time that there is"


def judge(error: Exception) -> Judgement:
    """What to make of a failed attempt.

    Only what another encoder would do better is tried there: one that cannot be reached, is silent,
    foreign, lying or full. A failure inside an encoder would most likely happen again.
    """
    match error:
        case Lie():
            return Judgement(True, "lie", Cause.LYING)
        case Silence():
            return Judgement(True, "silence", Cause.SILENT)
        case ChiasmError(reason=Reason.NOT_READY | Reason.NO_ENCODER | Reason.CALLER_NOT_ALLOWED):
            return Judgement(True, "unreachable", Cause.UNREACHABLE)
        case ChiasmError(reason=Reason.ENCODER_MISMATCH):
            return Judgement(True, "foreign", Cause.FOREIGN)
        case ChiasmError(reason=Reason.QUEUE_FULL):
            return Judgement(True, "full")
        case ChiasmError(reason=Reason.INTERNAL):
            return Judgement(False, "failure", counted=True)
        case ChiasmError(reason=reason) if reason in _OF_THE_PICTURE:
            return Judgement(False, "refused")
        case _:
            return Judgement(False, "other")


class Attempts:
    """The attempts for one picture, at most `most`."""

    def __init__(self, most: int) -> None:
        self.failures: list[Exception] = []
        self._most = most
        self._begun: dict[str, float] = {}
        self._count = 0

    @property
    def over(self) -> bool:
        return self._count >= self._most

    @property
    def refused(self) -> bool:
        """Whether an encoder was there and full: then waiting for one more would be wrong."""
        return any(judge(error).label == "full" for error in self.failures)

    def begin(self, address: str, now: float) -> None:
        self._begun[address] = now
        self._count += 1

    def allow(self, address: str, proved_at: float) -> bool:
        """Whether to ask this one: not asked yet, or back since then (time.monotonic)."""
        begun = self._begun.get(address)
        return begun is None or proved_at > begun

    def go_on(self, error: Exception) -> bool:
        """Notes a failure; returns whether another attempt makes sense."""
        self.failures.append(error)
        full = sum(judge(one).label == "full" for one in self.failures)
        return judge(error).elsewhere and full < _FULL_ATTEMPTS


def told(failures: Sequence[Exception]) -> ChiasmError:
    """What the caller is told after `failures`, in order; none: there was no encoder to ask."""
    last = failures[-1] if failures else None
    if isinstance(last, ChiasmError) and not judge(last).elsewhere:
        return _about_the_part(last)
    full = _with_reason(failures, Reason.QUEUE_FULL)
    if full is not None:
        text = "The encoders are busy; try again."
        return ChiasmError(full.reason, text, None, full.retry_after or RETRY_SECONDS)
    foreign = _with_reason(failures, Reason.ENCODER_MISMATCH)
    if foreign is not None:
        return ChiasmError(foreign.reason, foreign.message, metadata={"origin": "encoder"})
    if isinstance(last, Lie):
        return last.told
    return ChiasmError(
        Reason.NO_ENCODER,
        "No encoder answered. The picture was not encoded; try again.",
        retry_after=RETRY_SECONDS,
    )


def _with_reason(failures: Sequence[Exception], reason: Reason) -> ChiasmError | None:
    found = (one for one in failures if isinstance(one, ChiasmError) and one.reason is reason)
    return next(found, None)


def _about_the_part(error: ChiasmError) -> ChiasmError:
    # An encoder's field is relative to its own request: `image.data`.
    place = (error.field or "image").removeprefix("image").removeprefix(".") or None
    return ChiasmError(error.reason, error.message, place, error.retry_after, error.metadata)


class RetryBudget:
    """Bounds second attempts by a share of first ones, so that an outage is not made worse.

    A first attempt earns `share`, a further one costs 1; `reserve` may be spent beyond that at
    once. After Finagle's retry budgets.
    """

    def __init__(self, share: float, reserve: float) -> None:
        self._share = share
        self._most = reserve
        self._left = reserve

    def earn(self) -> None:
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Whether one more attempt may be made; takes it out of the budget."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Latencies:
    """The last answers' times in seconds, for the moment at which to hedge."""

    _LAST = 256
    _ENOUGH = 32

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self._LAST)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def quantile(self, share: float) -> float | None:
        """The time within which `share` of the answers came; None before there are enough."""
        if len(self._seconds) < self._ENOUGH:
            return None
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
