"""When all encoders may be gone at once, and when LLM services are renewed under open streams."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from chiasm.conversation import user
from tests.chaos.fleet import REQUEST_SECONDS, Chaos, Fleet, fleet, idle, in_thread
from tests.chaos.load import Outcome, Request, requests, send, send_all
from tests.system.processes import start_llm
from tests.system.three import Json, figure, messages_to_json, noise, until
from tests.tiny_llava import build_tiny_llava

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

CALLERS = 12
HURT_SECONDS = 40.0
# What a caller may be told when nobody can encode its picture; all say that a later try may help.
TELLING = {"503 no_encoder", "429 queue_full"}
# A reply's way back, on a busy machine.
GRACE_SECONDS = 5.0
STREAMS, STREAMED_TOKENS = 4, 150


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llava(tmp_path_factory.mktemp("outage") / "tiny")


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Fleet]:
    """Two encoders, two LLM services."""
    flags = ("--drain-seconds", "2", "--encoder-silence-seconds", "3")
    with fleet(checkpoint, 2, llm_count=2, llm_flags=flags) as made:
        yield made


async def test_when_all_encoders_may_be_gone_a_request_ends_rightly_or_in_a_typed_error(
    two: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = await requests(two, 400)
    # Each is hurt whatever becomes of the other.
    chaos = [Chaos([encoder], seed) for seed, encoder in enumerate(two.encoders)]
    hurting = [asyncio.create_task(one.run()) for one in chaos]
    sent: Counter[str] = Counter()
    outcome = await send_all(two, for_seconds(wanted, HURT_SECONDS, sent), CALLERS)
    for one in chaos:
        one.end()
    await asyncio.gather(*hurting)
    with capsys.disabled():
        print(f"\n{sum(len(one.faults) for one in chaos)} faults: {outcome.told()}")
    assert (outcome.wrong, outcome.untyped) == ([], [])
    assert set(outcome.errors) <= TELLING
    assert max(outcome.seconds) < REQUEST_SECONDS + GRACE_SECONDS
    # Who needs no encoder does not notice.
    for kind in ("text", "embedding"):
        assert outcome.right[kind] == sent[kind] > 0
    assert until(lambda: idle(two)) < 10
    assert until(lambda: all_ready(two)) < 10
    after = await send_all(two, wanted[:50], CALLERS)
    assert sum(after.right.values()) == 50


def for_seconds(wanted: Sequence[Request], seconds: float, sent: Counter[str]) -> Iterator[Request]:
    """All of them again and again for so long; counts them by kind."""
    began = time.monotonic()
    while True:
        for request in wanted:
            if time.monotonic() - began > seconds:
                return
            sent[request.kind] += 1
            yield request


def all_ready(two: Fleet) -> bool:
    ready = 'chiasm_llm_encoders{state="ready"}'
    return all(figure(llm, ready) == len(two.encoders) for llm in two.llms)


async def test_streams_and_pictures_go_on_while_both_llm_services_are_renewed(
    two: Fleet, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = await requests(two, 60)
    outcome, streamed, done = Outcome(), Counter[str](), asyncio.Event()
    questions = [streaming(two, seed) for seed in range(STREAMS)]
    async with two.http() as http:
        expected = [await stream(http, body) for body in questions]
        assert len(set(expected)) > 1

        async def ask() -> None:
            while not done.is_set():
                for request in wanted:
                    await send(http, request, outcome)

        async def watch(number: int) -> None:
            while not done.is_set():
                text = await stream(http, questions[number])
                streamed["right" if text == expected[number] else "wrong"] += 1

        working = [*(watch(number) for number in range(STREAMS)), ask(), ask()]
        running = [asyncio.create_task(one) for one in working]
        try:
            await in_thread(lambda: roll(two, checkpoint))
        finally:
            done.set()
            await asyncio.gather(*running)
    with capsys.disabled():
        print(f"\nboth LLM services renewed: streams {dict(streamed)}; {outcome.told()}")
    assert set(streamed) == {"right"}
    assert (outcome.wrong, outcome.untyped, dict(outcome.errors)) == ([], [], {})
    assert until(lambda: idle(two)) < 10


def roll(two: Fleet, checkpoint: Path) -> None:
    """SIGTERM, an orderly end, a new process at the same port; one after the other."""
    for at, llm in enumerate(two.llms):
        llm.terminate()
        assert llm.wait(60) == 0
        flags = llm.command[llm.command.index("--encoders") :]
        two.llms[at] = two.stack.enter_context(
            start_llm(checkpoint, *flags, "--port", str(llm.port))
        )
        # The gateway looks for it about once a second.
        time.sleep(3)


def streaming(two: Fleet, seed: int) -> Json:
    """The body of a long answer about a picture, in pieces."""
    turns = [user(noise(20_000 + seed), "Tell all.")]
    return {
        "model": two.model,
        "messages": messages_to_json(turns),
        "temperature": 0,
        "max_tokens": STREAMED_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }


async def stream(http: httpx.AsyncClient, body: Json) -> str:
    """The text of a whole stream; what went wrong, in brackets, if it was not whole."""
    pieces: list[str] = []
    reason = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return f"[{response.status_code}]"
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return "".join(pieces) if reason == "length" else f"[ended by {reason!r}]"
            told = json.loads(line.removeprefix("data: "))
            if "error" in told:
                return f"[{told['error']['code']}]"
            for choice in told["choices"]:
                pieces.append(choice["delta"].get("content") or "")
                reason = choice["finish_reason"] or reason
    return "[cut off]"
