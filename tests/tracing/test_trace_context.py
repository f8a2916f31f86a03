"""The headers of W3C trace context: what is accepted, and what is left out."""

import pytest

from chiasm.tracing.w3c import NO_TRACE, Trace, accepted

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"

MANY = {count: ",".join(f"k{i}=v" for i in range(count)) for count in (32, 33)}
STATES: dict[str, tuple[tuple[str, ...], str]] = {
    "none": ((), ""),
    "one": (("rojo=00f067aa0ba902b7",), "rojo=00f067aa0ba902b7"),
    "two": (("rojo=1,congo=t61rcWkgMzE",), "rojo=1,congo=t61rcWkgMzE"),
    "in two headers": (("rojo=1", "congo=2"), "rojo=1,congo=2"),
    "spaces and empty members": (("rojo=1 ,\t, congo=2",), "rojo=1,congo=2"),
    "of a tenant": (("fw529a3039@dt=FfAAYw",), "fw529a3039@dt=FfAAYw"),
    "space inside": (("a=b c",), "a=b c"),
    "32 members": ((MANY[32],), MANY[32]),
    "33 members": ((MANY[33],), ""),
    "longest": (("k=" + "v" * 256, "l=" + "v" * 251), f"k={'v' * 256},l={'v' * 251}"),
    "too long a list": (("k=" + "v" * 256, "l=" + "v" * 252), ""),
    "far too long": (("k=" + "v" * 100_000,), ""),
    "too long a value": (("k=" + "v" * 257,), ""),
    "no value": (("k=",), ""),
    "no key": (("=v",), ""),
    "no sign": (("rojo",), ""),
    "upper case": (("Rojo=1",), ""),
    "a key twice": (("k=1,k=2",), ""),
    "control character": (("k=a\x00b",), ""),
    "new line": (("k=a\nb",), ""),
    "not ASCII": (("k=\u00fc",), ""),
    "one bad of two": (("k=1,b@d@=,",), ""),
}  # fmt: skip


@pytest.mark.parametrize(("sent", "kept"), STATES.values(), ids=STATES.keys())
def test_a_tracestate_is_kept_whole_or_left_out(sent: tuple[str, ...], kept: str) -> None:
    trace = accepted([PARENT], sent)
    assert trace == Trace(PARENT, kept)
    assert trace.id == TRACE
    state = (("tracestate", kept),) if kept else ()
    assert trace.headers() == (("traceparent", PARENT), *state)


@pytest.mark.parametrize(
    "parents",
    [[], [""], [PARENT, PARENT], [PARENT.upper()], [f"{PARENT}-more"], [f"ff{PARENT[2:]}"],
     [PARENT.replace(TRACE, "0" * 32)], [PARENT + "\n"], ["\u00fc" + PARENT]],
)  # fmt: skip
def test_a_state_without_its_trace_is_nothing(parents: list[str]) -> None:
    assert accepted(parents, ["rojo=1"]) == NO_TRACE
    assert NO_TRACE.headers() == ()


def test_a_later_version_goes_on_as_it_came() -> None:
    later = f"cc{PARENT[2:]}-more"
    assert accepted([f" {later}\t"], []) == Trace(later)
