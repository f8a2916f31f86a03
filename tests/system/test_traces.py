"""One trace over gateway, LLM service and encoder: real processes, a real collector."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from chiasm.client import AsyncClient
from chiasm.conversation import Sampling, user
from tests.system.processes import start_llm
from tests.system.test_cases_whole import CHATS
from tests.system.three import Three, noise, three
from tests.tracing.collector import Collector, Seen, collecting

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

CALLER = "00f067aa0ba902b7"
SECRET = "what nobody else may read"
CALL, ENCODE = "chiasm.v1.LlmService/Generate", "chiasm.v1.EncoderService/EncodeImage"


@dataclass(frozen=True)
class Traced:
    """The three processes and the collector that they send their spans to."""

    three: Three
    collector: Collector

    async def asked(
        self, number: int, *pictures: bytes, flags: str = "01", status: int = 200
    ) -> str:
        """Asks about pictures within a trace of its own; returns the id of that."""
        trace = f"4bf92f3577b34da6a3ce929d0e0e{number:04x}"
        headers = {"traceparent": f"00-{trace}-{CALLER}-{flags}", "x-request-id": f"id-{number}"}
        body = self.three.body([user(*pictures, SECRET)], max_tokens=3, ignore_eos=True)
        async with self.three.http() as http:
            answer = await http.post(CHATS, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return trace

    async def seen(self, trace: str, *last: str) -> list[Seen]:
        """The spans of a trace once the processes have sent those named `last`."""

        def complete(found: Sequence[Seen]) -> bool:
            return set(last) <= {one.name for one in found}

        return await asyncio.to_thread(self.collector.of_trace, trace, complete)


@pytest.fixture(scope="module")
def traced(tiny_checkpoint: Path) -> Iterator[Traced]:
    with collecting() as collector:
        flags = ("--trace-endpoint", collector.endpoint)
        with three(
            tiny_checkpoint, encoder_flags=flags, llm_flags=flags, gateway_flags=flags
        ) as system:
            yield Traced(system, collector)


def tree(found: Sequence[Seen], of: str) -> list[object]:
    """The names of the spans below the one with the id `of`, nested, in the order of their begin.

    A name is followed by the list of what is below it, if anything is.
    """
    told: list[object] = []
    below = [one for one in found if one.parent == of]
    for one in sorted(below, key=lambda one: one.span.start_time_unix_nano):
        told.append(one.name)
        if deeper := tree(found, one.id):
            told.append(deeper)
    return told


def named(found: Sequence[Seen], name: str) -> list[Seen]:
    return [one for one in found if one.name == name]


ASKED = ["ask encoder", [ENCODE, ["queue", "decode image", "queue", "tower"], "transfer"]]
ENGINE = ["queue", "prefill", "decode"]
GATEWAY = "POST /v1/chat/completions"


async def test_one_trace_goes_through_all_three(traced: Traced) -> None:
    picture = noise(700)
    # So that the card has been read, which is a call of its own.
    await traced.asked(0)
    trace = await traced.asked(1, picture)
    found = await traced.seen(trace, GATEWAY, CALL, ENCODE)
    assert tree(found, CALLER) == [
        GATEWAY, [CALL, ["prepare", "vision", ["picture", ASKED], "engine", ENGINE]],
    ]  # fmt: skip
    assert {one.name: one.service for one in found if one.name in (GATEWAY, CALL, ENCODE)} == {
        GATEWAY: "chiasm-gateway", CALL: "chiasm-llm", ENCODE: "chiasm-encoder",
    }  # fmt: skip
    kinds = {one.name: one.span.kind for one in found}
    assert (kinds[CALL], kinds["ask encoder"], kinds["engine"]) == (2, 3, 1)
    for one in (*named(found, GATEWAY), *named(found, CALL), *named(found, ENCODE)):
        assert one.attributes["chiasm.request.id"] == "id-1"
    assert not any(one.failed for one in found)

    (call,) = named(found, CALL)
    told = call.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.provider.name"] == "chiasm"
    assert told["gen_ai.request.model"] == traced.three.model
    assert told["gen_ai.request.max_tokens"] == told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.request.temperature"] == 0
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] > told["chiasm.usage.image_tokens"] > 0
    assert told["rpc.response.status_code"] == "OK"
    lasted = (call.span.end_time_unix_nano - call.span.start_time_unix_nano) / 1e9
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < lasted
    (decode,) = named(found, "decode")
    assert [event.name for event in decode.span.events] == ["first token"]

    (path,) = named(found, "picture")
    assert path.attributes["chiasm.image.source"] == "remote"
    assert path.attributes["chiasm.image.rows"] == told["chiasm.usage.image_tokens"]
    assert path.attributes["chiasm.encoder.cache_hit"] is False
    (ask,) = named(found, "ask encoder")
    assert ask.attributes["server.port"] == traced.three.encoder.port
    (encode,) = named(found, ENCODE)
    assert encode.attributes["chiasm.encode.source"] == "computed"
    (transfer,) = named(found, "transfer")
    assert transfer.attributes["chiasm.tensor.bytes"] == encode.attributes["chiasm.tensor.bytes"]


async def test_stages_lie_within_what_they_are_stages_of(traced: Traced) -> None:
    trace = await traced.asked(2, noise(701), noise(702))
    found = await traced.seen(trace, GATEWAY, CALL, ENCODE)
    by_id = {one.id: one for one in found}
    # The clock of the engine's thread and of the call are read a moment apart.
    slack = 5_000_000
    for one in found:
        whole = by_id.get(one.parent)
        if whole is None:
            continue
        assert whole.span.start_time_unix_nano - slack <= one.span.start_time_unix_nano
        assert one.span.start_time_unix_nano <= one.span.end_time_unix_nano
        assert one.span.end_time_unix_nano <= whole.span.end_time_unix_nano + slack
    indices = sorted(one.attributes["chiasm.image.index"] for one in named(found, "picture"))
    assert indices == [0, 1]
    assert len(named(found, ENCODE)) == 2


async def test_a_picture_that_is_cached_asks_no_encoder(traced: Traced) -> None:
    picture = noise(703)
    await traced.asked(3, picture)
    trace = await traced.asked(4, picture)
    found = await traced.seen(trace, GATEWAY, CALL)
    assert tree(named(found, "vision") + named(found, "picture"), named(found, CALL)[0].id) == [
        "vision", ["picture"],
    ]  # fmt: skip
    assert named(found, "picture")[0].attributes["chiasm.image.source"] == "cache"
    assert named(found, "ask encoder") == []


async def test_the_callers_flag_keeps_all_three_quiet(traced: Traced) -> None:
    trace = await traced.asked(5, noise(704), flags="00")
    later = await traced.asked(6, noise(705))
    await traced.seen(later, GATEWAY, CALL, ENCODE)
    assert not [one for one in traced.collector.spans() if one.trace == trace]
    for process in traced.three.processes:
        lines = [line for line in process.log().splitlines() if "id-5" in line]
        assert lines and all(f"trace_id={trace}" in line for line in lines)


async def test_a_picture_that_is_refused_is_told_by_its_reason(traced: Traced) -> None:
    # Whole enough to be measured, so that the encoder is who finds the fault.
    broken = noise(706)[:-40]
    trace = await traced.asked(7, broken, status=400)
    found = await traced.seen(trace, GATEWAY, CALL, ENCODE)
    reasons = {one.name: (one.attributes.get("error.type"), one.failed) for one in found}
    for server in (GATEWAY, CALL, ENCODE):
        assert reasons[server] == ("IMAGE_INVALID", False)
    for stage in ("vision", "picture", "ask encoder"):
        assert reasons[stage] == ("IMAGE_INVALID", True)


async def test_nothing_that_was_sent_or_answered_is_in_a_span(traced: Traced) -> None:
    trace = await traced.asked(8, noise(707))
    await traced.seen(trace, GATEWAY, CALL, ENCODE)
    whole = b"".join(one.SerializeToString() for one in traced.collector.requests)
    assert SECRET.encode() not in whole
    assert len(whole) < 2_000 * len(traced.collector.spans())


async def test_encoders_are_watched_without_traces(traced: Traced) -> None:
    await asyncio.sleep(2.5)
    assert not [one for one in traced.collector.spans() if one.name.endswith("GetLoad")]


async def test_a_client_that_leaves_is_no_failure(traced: Traced) -> None:
    async with AsyncClient(traced.three.llm.target, traced.three.encoder.target) as client:
        stream = client.stream(
            [user(SECRET)], Sampling(max_tokens=1500, ignore_eos=True), request_id="id-left"
        )
        async for _ in stream:
            break
        await stream.aclose()

    def left(found: Sequence[Seen]) -> list[Seen]:
        return [one for one in found if one.attributes.get("chiasm.request.id") == "id-left"]

    for _ in range(200):
        if left(traced.collector.spans()):
            break
        await asyncio.sleep(0.05)
    (call,) = left(traced.collector.spans())
    assert call.parent == ""
    assert call.attributes["error.type"] == "CANCELLED" and not call.failed
    (engine,) = [one for one in traced.collector.spans() if one.parent == call.id
                 and one.name == "engine"]  # fmt: skip
    assert engine.attributes["error.type"] == "CANCELLED" and not engine.failed


async def test_a_tower_in_the_llm_service_has_its_stages_there(
    traced: Traced, tiny_checkpoint: Path
) -> None:
    flags = ("--vision", "local", "--trace-endpoint", traced.collector.endpoint)
    with start_llm(tiny_checkpoint, *flags) as llm:
        async with AsyncClient(llm.target) as client:
            await client.generate(
                [user(noise(708), SECRET)], Sampling(max_tokens=2), request_id="id-local"
            )
        llm.terminate()
        assert llm.wait() == 0
    (call,) = [one for one in traced.collector.spans()
               if one.attributes.get("chiasm.request.id") == "id-local"]  # fmt: skip
    found = [one for one in traced.collector.spans() if one.trace == call.trace]
    assert tree(found, call.id) == [
        "prepare", "vision", ["picture", ["decode image", "tower"]], "engine", ENGINE,
    ]  # fmt: skip
    assert named(found, "picture")[0].attributes["chiasm.image.source"] == "local"


async def test_an_encoder_that_dies_leaves_its_attempt_in_the_trace(traced: Traced) -> None:
    """The last test: the encoder does not come back."""
    traced.three.encoder.kill()
    trace = await traced.asked(9, noise(709), status=503)
    found = await traced.seen(trace, GATEWAY, CALL)
    reasons = {one.name: (one.attributes.get("error.type"), one.failed) for one in found}
    assert reasons[GATEWAY] == reasons[CALL] == reasons["picture"] == ("NO_ENCODER", True)
    for attempt in named(found, "ask encoder"):
        assert attempt.failed and attempt.attributes["error.type"] == "NOT_READY"
