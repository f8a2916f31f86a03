"""What the code calls to be traced. Costs a look at a context variable where nothing is traced.

    with request(...) as span:       the span of the whole request, child of the caller's
        with stage("vision"):        a stage of it; calls made inside are children of the stage
            ...
    begun = begin("engine")          a span that is not made current, for a generator to hold
    span.past("queue", began, ended) a stage that is over

Times are time.monotonic() seconds. Where a trace is not sampled, or the process sends none, every
span is `NOTHING`, which takes all of it and does nothing.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from chiasm.errors import ChiasmError, Reason
from chiasm.tracing.metrics import Sent
from chiasm.tracing.w3c import NO_TRACE, Trace

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["server", "client", "internal"]
_NONE: Final[Attributes] = {}
# HTTP status from which an error is the server's own.
_SERVERS_FAULT: Final = 500


class Span(Protocol):
    """One piece of work in a trace."""

    @property
    def recording(self) -> bool:
        """Whether it will be sent; if not, nothing need be gathered for it."""

    @property
    def id(self) -> str:
        """16 hex digits; empty where it is not recorded."""

    @property
    def trace(self) -> Trace:
        """What calls made within this span carry."""

    def put(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def fail(self, reason: str, *, error: bool = True) -> None:
        """Says why it failed, by one of few words. `error`: whether that is this side's failure."""

    def child(self, name: str, kind: Kind, attributes: Attributes) -> "Span":
        """A span within this one, begun now."""

    def past(
        self,
        name: str,
        began: float,
        ended: float,
        attributes: Attributes = _NONE,
        event: tuple[str, float] | None = None,
    ) -> None:
        """Adds a span within this one that is over, with a moment in it by its name and time."""

    def end(self) -> None:
        """Ends it now, and hands it on to be sent."""


class _Nothing:
    """The span of what is not traced."""

    recording = False
    id = ""
    trace = NO_TRACE

    def put(self, attributes: Attributes) -> None:
        return None

    def fail(self, reason: str, *, error: bool = True) -> None:
        return None

    def child(self, name: str, kind: Kind, attributes: Attributes) -> Span:
        return NOTHING

    def past(
        self,
        name: str,
        began: float,
        ended: float,
        attributes: Attributes = _NONE,
        event: tuple[str, float] | None = None,
    ) -> None:
        return None

    def end(self) -> None:
        return None


NOTHING: Final[Span] = _Nothing()


class Tracer(Protocol):
    """What makes the spans of requests: `chiasm.tracing.export` has one."""

    def begin(self, name: str, caller: Trace, attributes: Attributes) -> tuple[Span, Trace]:
        """The span of a request and the trace that it belongs to, which may be a new one.

        The span is `NOTHING` where that trace is not sampled.
        """

    def sent(self) -> Sent:
        """What became of the spans so far."""


@dataclass(frozen=True)
class _Here:
    span: Span
    trace: Trace


_NOWHERE: Final = _Here(NOTHING, NO_TRACE)
_HERE: ContextVar[_Here] = ContextVar("chiasm_trace", default=_NOWHERE)
# Of the process; None: it sends no spans. Set once, before it serves.
_tracer: Tracer | None = None


def trace_with(tracer: Tracer | None) -> None:
    """Sets what makes the spans of this process."""
    global _tracer
    _tracer = tracer


def tracer() -> Tracer | None:
    """What makes the spans of this process; None where it sends none."""
    return _tracer


def current() -> Span:
    """The span of the work in hand."""
    return _HERE.get().span


def current_trace() -> Trace:
    """What a call made now carries, whether the trace is sampled or not."""
    return _HERE.get().trace


@contextmanager
def request(
    name: str, caller: Trace, attributes: Attributes = _NONE, *, begins: bool = True
) -> Iterator[Span]:
    """The span of a request, current while open. The trace goes on in calls made inside.

    Args:
        caller: the trace that the caller is in.
        begins: whether a request without a trace begins one; health checks do not.
    """
    span, trace = NOTHING, caller
    if _tracer is not None and (begins or caller.parent):
        span, trace = _tracer.begin(name, caller, attributes)
    token = _HERE.set(_Here(span, trace))
    try:
        yield span
    finally:
        _HERE.reset(token)
        span.end()


@contextmanager
def stage(name: str, attributes: Attributes = _NONE, kind: Kind = "internal") -> Iterator[Span]:
    """A span within the current one, current while open. What is raised inside fails it."""
    parent = _HERE.get().span
    if not parent.recording:
        yield NOTHING
        return
    span = parent.child(name, kind, attributes)
    token = _HERE.set(_Here(span, span.trace))
    try:
        yield span
    except BaseException as error:
        raised(span, error)
        raise
    finally:
        _HERE.reset(token)
        span.end()


def begin(name: str, attributes: Attributes = _NONE) -> Span:
    """A span within the current one, which its holder ends."""
    return current().child(name, "internal", attributes)


def raised(span: Span, error: BaseException) -> None:
    """Says of `span` what `error` ended it."""
    match error:
        case ChiasmError(reason=Reason.CANCELLED):
            span.fail(Reason.CANCELLED, error=False)
        case ChiasmError(reason=reason):
            span.fail(reason)
        # A generator is closed where its reader left.
        case asyncio.CancelledError() | GeneratorExit():
            span.fail(Reason.CANCELLED, error=False)
        case _:
            span.fail(type(error).__name__)


def refused(span: Span, reason: str, http_status: int) -> None:
    """Says of a server's span why it answered with an error.

    That is the server's own failure from the status 500 on, as conventions have it.
    """
    span.fail(reason, error=http_status >= _SERVERS_FAULT)
