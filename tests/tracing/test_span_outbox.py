"""The way of spans to a real collector: bounded, never waited for, and counted."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from chiasm.errors import ChiasmError, Reason
from chiasm.tracing import spans
from chiasm.tracing.export import Outbox, exporter, exporting, provider
from chiasm.tracing.settings import TraceSettings
from chiasm.tracing.w3c import NO_TRACE, Trace
from tests.tracing.collector import Collector, collecting

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = Trace(f"00-{TRACE}-00f067aa0ba902b7-01", "rojo=1")
# A call on the request's path; far above what it takes, far below any wait for a collector.
AT_ONCE = 0.5


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as open_one:
        yield open_one


@contextmanager
def traced(endpoint: str, *, ratio: float = 1, most: int = 4096) -> Iterator[Outbox]:
    """Spans of this process go to `endpoint`."""
    settings = TraceSettings(endpoint, ratio)
    outbox = Outbox(exporter(settings), most)
    with exporting(provider(settings, "test"), outbox):
        yield outbox


def ask(count: int, caller: Trace = SAMPLED) -> float:
    """The longest time that a request with one span took."""
    longest = 0.0
    for _ in range(count):
        began = time.monotonic()
        with spans.request("request", caller):
            pass
        longest = max(longest, time.monotonic() - began)
    return longest


def test_what_waits_is_sent_when_the_process_ends(collector: Collector) -> None:
    with traced(collector.endpoint) as outbox:
        ask(10)
    assert len(collector.spans()) == outbox.sent().exported == 10
    assert {one.service for one in collector.spans()} == {"chiasm-test"}
    assert {one.span.trace_state for one in collector.spans()} == {"rojo=1"}


def test_a_collector_that_hangs_holds_nobody_up_and_costs_bounded_memory(
    collector: Collector,
) -> None:
    collector.block()
    with traced(collector.endpoint, most=600) as outbox:
        assert ask(128) < AT_ONCE
        deadline = time.monotonic() + 5
        while not collector.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        # One batch of 128 is with the collector; 600 more fit.
        assert ask(700) < AT_ONCE
        assert outbox.sent().dropped["queue_full"] == 100
        ending = time.monotonic()
    assert time.monotonic() - ending < 2
    sent = outbox.sent()
    assert sent.exported == 0
    assert sum(sent.dropped.values()) == 828


def test_without_a_collector_spans_are_lost_and_counted() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with traced(f"http://127.0.0.1:{nobody.getsockname()[1]}") as outbox:
            assert ask(20) < AT_ONCE
            ending = time.monotonic()
        assert time.monotonic() - ending < 2
    assert outbox.sent().exported == 0
    assert sum(outbox.sent().dropped.values()) == 20


def test_a_collector_that_comes_late_gets_what_comes_then() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    with traced(f"http://127.0.0.1:{port}") as outbox:
        ask(5)
        deadline = time.monotonic() + 15
        while not outbox.sent().dropped["export_failed"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert outbox.sent().dropped["export_failed"] == 5
        with collecting(port) as late:
            ask(7)
            late.of_trace(TRACE, lambda seen: len(seen) == 7)


@pytest.mark.parametrize(("ratio", "caller", "sent"), [
    (0, SAMPLED, True), (1, Trace(SAMPLED.parent[:-1] + "0"), False),
    (0, NO_TRACE, False), (1, NO_TRACE, True),
    # Flags that are not known are not passed on; `sampled` is one of them here.
    (0, Trace(SAMPLED.parent[:-2] + "ff"), True),
])  # fmt: skip
def test_a_callers_flag_counts_and_else_the_ratio(
    collector: Collector, ratio: float, caller: Trace, sent: bool
) -> None:
    with traced(collector.endpoint, ratio=ratio), spans.request("request", caller) as span:
        going_on = spans.current_trace()
        assert span.recording is sent
        assert (going_on.id == caller.id) is bool(caller.parent)
        assert going_on.parent != caller.parent
        assert going_on.parent.endswith("-01" if sent else "-00")
        assert going_on.state == caller.state
    assert [one.name for one in collector.spans()] == ["request"] * sent


def test_a_share_of_the_traces_that_begin_here_is_sent(collector: Collector) -> None:
    with traced(collector.endpoint, ratio=0.25):
        ask(2000, NO_TRACE)
    assert 350 < len(collector.spans()) < 650


def test_a_failure_is_told_by_its_reason_and_never_by_its_text(collector: Collector) -> None:
    secret = "the prompt"
    failures: list[tuple[Exception, str]] = [
        (ChiasmError(Reason.IMAGE_INVALID, secret, secret), "IMAGE_INVALID"),
        (ValueError(secret), "ValueError"),
    ]
    with traced(collector.endpoint), spans.request("request", SAMPLED):
        for failure, _ in failures:
            with pytest.raises(type(failure)), spans.stage("stage"):
                raise failure
    seen = [one for one in collector.spans() if one.name == "stage"]
    assert [one.attributes["error.type"] for one in seen] == [word for _, word in failures]
    assert [one.span.status.message for one in seen] == [word for _, word in failures]
    assert all(one.failed for one in seen)
    assert not any(secret in str(one.span) for one in seen)


def test_stages_hang_together_and_lie_within_the_request(collector: Collector) -> None:
    with traced(collector.endpoint), spans.request("request", SAMPLED) as request:
        came = time.monotonic()
        with spans.stage("outer"), spans.stage("inner"):
            carried = spans.current_trace().parent
        request.past("over", came, time.monotonic())
    found = {one.name: one for one in collector.spans()}
    assert found["request"].parent == "00f067aa0ba902b7"
    assert found["outer"].parent == found["over"].parent == found["request"].id
    assert found["inner"].parent == found["outer"].id
    assert carried == f"00-{TRACE}-{found['inner'].id}-01"
    whole = found["request"].span
    for one in found.values():
        assert whole.start_time_unix_nano <= one.span.start_time_unix_nano
        assert one.span.end_time_unix_nano <= whole.end_time_unix_nano
