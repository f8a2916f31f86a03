"""W3C trace context (https://www.w3.org/TR/trace-context/): which trace a request belongs to."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TRACE_PARENT: Final = "traceparent"
TRACE_STATE: Final = "tracestate"

# Later versions may go on after a dash.
_PARENT: Final = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}"
    r"-[0-9a-f]{2}(?P<more>-[\x20-\x7e]{0,200})?"
)
_MEMBER: Final = re.compile(
    r"(?P<key>[a-z0-9][a-z0-9_*/@-]{0,255})="
    r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MOST_MEMBERS: Final = 32
# Characters that every vendor must be able to rely on; more is not sent on.
_MOST_STATE: Final = 512


@dataclass(frozen=True)
class Trace:
    """The trace that the work in hand belongs to, as the two headers say it; empty: none."""

    parent: str = ""
    state: str = ""

    @property
    def id(self) -> str:
        """32 hex digits; empty where there is no trace."""
        return self.parent[3:35]

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What a call made now carries."""
        if not self.parent:
            return ()
        parent = (TRACE_PARENT, self.parent)
        return (parent, (TRACE_STATE, self.state)) if self.state else (parent,)


NO_TRACE: Final = Trace()


def accepted(parents: Sequence[str], states: Sequence[str]) -> Trace:
    """The trace that a caller claims by its headers, in the order in which they came.

    No trace unless there is exactly one well-formed `traceparent`. A `tracestate` that is malformed
    or longer than 512 characters is left out.
    """
    found = _PARENT.fullmatch(parents[0].strip(" \t")) if len(parents) == 1 else None
    if found is None or (found["version"] == "00" and found["more"]):
        return NO_TRACE
    return Trace(found[0], _accepted_state(states))


def _accepted_state(states: Sequence[str]) -> str:
    if sum(map(len, states)) > 2 * _MOST_STATE:
        return ""
    members = [one.strip(" \t") for one in ",".join(states).split(",")]
    found = [_MEMBER.fullmatch(one) for one in members if one]
    keys = {one["key"] for one in found if one}
    # A key that comes twice makes the whole list invalid.
    if len(keys) != len(found) or len(found) > _MOST_MEMBERS:
        return ""
    state = ",".join(one[0] for one in found if one)
    return state if len(state) <= _MOST_STATE else ""
