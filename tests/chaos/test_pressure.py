"""Too many pictures at once, callers that leave, an LLM service that is killed: nothing is lost."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chiasm import wire
from chiasm.client import AsyncClient
from chiasm.conversation import Message, Sampling, user
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.channel import EncoderMethods, open_channel
from chiasm.v1 import encoder_service_pb2
from tests.chaos.fleet import Fleet, fleet, idle
from tests.system.processes import ServiceProcess, start_gateway, start_llm
from tests.system.three import Json, figure, messages_to_json, noise, until
from tests.tiny_llava import build_tiny_llava

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

# Each of two encoders; one request's pictures fit in, a burst's do not.
QUEUE, MANY, BURST = 40, 64, 200
TEXTS = 20
# Text-only requests beside a burst, on two cores that the burst fills.
TEXT_WITHIN_SECONDS = 5.0
LEFT_WITHIN_SECONDS = 1.0
BACK_WITHIN_SECONDS = 10.0
# Long enough that the encoders have begun, and far from done.
BEGUN_SECONDS = 0.4
SHORT = Sampling(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick decoder whose tower takes about a tenth of a second for a picture."""
    return build_tiny_llava(
        tmp_path_factory.mktemp("pressure") / "slow-eye", image_size=112, context_length=8192,
        vision_hidden_size=480, vision_layer_count=12,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> Iterator[Fleet]:
    """Two encoders with short queues."""
    with (
        fleet(
            checkpoint,
            2,
            # No cache: what is asked for again is work again.
            encoder_flags=("--max-queue-images", str(QUEUE), "--cache-bytes", "0"),
            llm_flags=("--max-images", str(MANY), "--no-prefix-cache"),
        ) as made,
        start_gateway(made.llm.port, "--max-images", str(MANY)) as gateway,
    ):
        yield replace(made, gateway=gateway)


@pytest.fixture(autouse=True)
def calm(small: Fleet) -> Iterator[None]:
    """Nothing is in hand before a test and nothing is left after it."""
    assert until(lambda: idle(small) and encoders_idle(small), 20) < 20
    yield
    assert until(lambda: idle(small) and encoders_idle(small), 20) < 20


def body(small: Fleet, turns: list[Message]) -> Json:
    return {
        "model": small.model,
        "messages": messages_to_json(turns),
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
    }


async def post(http: httpx.AsyncClient, small: Fleet, turns: list[Message]) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=body(small, turns))


def text_of(response: httpx.Response) -> str:
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def many(first_seed: int) -> list[Message]:
    """One request of `MANY` pictures that no other has."""
    return [user(*(noise(first_seed + number) for number in range(MANY)), "Which?")]


async def test_a_burst_is_answered_or_told_when_to_try_again_and_text_runs_on_beside_it(
    small: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = {seed: [user(noise(seed), "What is it?")] for seed in range(50_000, 50_000 + BURST)}
    async with small.http() as http:
        calm_text = text_of(await post(http, small, [user("Say something.")]))
        began = time.monotonic()
        burst = asyncio.create_task(all_of(http, small, turns))
        texts = [await timed_text(http, small, burst) for _ in range(TEXTS)]
        first = await burst
        took = time.monotonic() - began
        answers, rounds = await insisted(http, small, turns, first)
        statuses = Counter(response.status_code for response in first.values())
        with capsys.disabled():
            print(f"\n{BURST} pictures at once: {dict(statuses)} in {took:.1f} s, all answered "
                  f"after {rounds} rounds and {time.monotonic() - began:.0f} s; text beside "
                  f"{sum(one.beside for one in texts)} times, at most "
                  f"{max(one.seconds for one in texts):.2f} s")  # fmt: skip
        assert set(statuses) == {200, 429}
        assert statuses[200] >= 2 * QUEUE
        for response in first.values():
            check_answered_or_told(response)
        assert set(answers) == set(turns)
        for seed in list(turns)[:: BURST // 20]:
            assert answers[seed] == text_of(await post(http, small, turns[seed]))
    assert {one.text for one in texts} == {calm_text}
    assert max(one.seconds for one in texts) < TEXT_WITHIN_SECONDS
    assert any(one.beside for one in texts)


class Text:
    """One answer to text only: its seconds, and whether the burst was still going on."""

    def __init__(self, text: str, seconds: float, beside: bool) -> None:
        self.text, self.seconds, self.beside = text, seconds, beside


async def timed_text(
    http: httpx.AsyncClient, small: Fleet, burst: "asyncio.Task[dict[int, httpx.Response]]"
) -> Text:
    await asyncio.sleep(0.1)
    began = time.monotonic()
    text = text_of(await post(http, small, [user("Say something.")]))
    return Text(text, time.monotonic() - began, not burst.done())


async def all_of(
    http: httpx.AsyncClient, small: Fleet, turns: dict[int, list[Message]]
) -> dict[int, httpx.Response]:
    """Asks all at once."""
    responses = await asyncio.gather(*(post(http, small, one) for one in turns.values()))
    return dict(zip(turns, responses, strict=True))


async def insisted(
    http: httpx.AsyncClient,
    small: Fleet,
    turns: dict[int, list[Message]],
    responses: dict[int, httpx.Response],
) -> tuple[dict[int, str], int]:
    """Asks again as told for what was refused, until there is an answer to all."""
    answers: dict[int, str] = {}
    rounds = 1
    while True:
        answers |= {seed: text_of(one) for seed, one in responses.items() if one.status_code == 200}
        left = {seed: one for seed, one in turns.items() if seed not in answers}
        if not left or rounds == 20:
            return answers, rounds
        await asyncio.sleep(
            max(int(responses[seed].headers["retry-after"]) for seed in left if seed in responses)
        )
        rounds += 1
        responses = await all_of(http, small, left)
        for response in responses.values():
            check_answered_or_told(response)


def check_answered_or_told(response: httpx.Response) -> None:
    assert response.status_code in (200, 429), response.text
    if response.status_code == 429:
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1


async def test_a_request_of_64_pictures_is_answered_by_all_encoders_together(
    small: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = many(60_000)
    before = [encoded(one.process) for one in small.encoders]
    async with small.http() as http:
        began = time.monotonic()
        response = await post(http, small, turns)
        took = time.monotonic() - began
        assert response.status_code == 200, response.text
        shares = [
            encoded(one.process) - then for one, then in zip(small.encoders, before, strict=True)
        ]
        with capsys.disabled():
            print(f"\n{MANY} pictures in one request: {took:.1f} s, encoders {shares}")
        assert text_of(response) == text_of(await post(http, small, turns))
    assert sum(shares) == MANY
    assert min(shares) >= MANY // 4


async def test_three_requests_of_64_pictures_are_each_answered_or_told_when_to_try_again(
    small: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    async with small.http() as http:
        responses = await asyncio.gather(
            *(post(http, small, many(70_000 + 100 * number)) for number in range(3))
        )
    with capsys.disabled():
        print(f"\nthree requests of {MANY}: {[one.status_code for one in responses]}")
    for response in responses:
        check_answered_or_told(response)


async def test_an_http_caller_that_leaves_takes_its_pictures_out_of_the_encoders(
    small: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    async with small.http() as http, left_at_once(small, capsys, "HTTP caller left"):
        asking = asyncio.create_task(post(http, small, many(80_000)))
        await begun(small)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_grpc_caller_that_cancels_takes_its_pictures_out_of_the_encoders(
    small: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        AsyncClient(small.llm.target, timeout=60) as client,
        left_at_once(small, capsys, "gRPC caller left"),
    ):
        asking = asyncio.create_task(client.generate(many(81_000), SHORT))
        await begun(small)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_deadline_that_passes_takes_its_pictures_out_of_the_encoders(
    small: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 1.0
    async with (
        AsyncClient(small.llm.target, timeout=seconds) as client,
        left_at_once(small, capsys, "deadline passed"),
    ):
        began = time.monotonic()
        with pytest.raises(ChiasmError) as failed:
            await client.generate(many(82_000), SHORT)
        assert failed.value.reason is Reason.DEADLINE
        assert time.monotonic() - began < seconds + 0.5


async def test_an_llm_service_that_is_killed_leaves_no_work_and_is_found_again(
    small: Fleet, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with small.http() as http:
        text = [user("Say something.")]
        before = text_of(await post(http, small, text))
        async with left_at_once(small, capsys, "LLM service killed"):
            asking = asyncio.create_task(post(http, small, many(83_000)))
            await begun(small)
            small.llm.kill()
            lost = await asking
        assert lost.status_code in (500, 503), lost.text
        assert lost.json()["error"]["type"] == "server_error"
        refused = await post(http, small, text)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        command = list(small.llm.command)
        flags = command[command.index("--encoders") :]
        small.llms[0] = small.stack.enter_context(
            start_llm(checkpoint, *flags, "--port", str(small.llm.port))
        )
        began = time.monotonic()
        while (again := await post(http, small, text)).status_code != 200:
            assert time.monotonic() - began < BACK_WITHIN_SECONDS, again.text
            await asyncio.sleep(0.1)
        assert text_of(again) == before
        assert (await post(http, small, [user(noise(5), "What?")])).status_code == 200


@asynccontextmanager
async def left_at_once(
    small: Fleet, capsys: pytest.CaptureFixture[str], what: str
) -> AsyncIterator[None]:
    """What runs inside leaves pictures in the middle; soon no encoder works on them."""
    before = [encoded(one.process) for one in small.encoders]
    dropped_before = sum(dropped(one.process) for one in small.encoders)
    yield
    began = time.monotonic()
    while not await nothing_in_hand(small):
        assert time.monotonic() - began < LEFT_WITHIN_SECONDS
    took = time.monotonic() - began
    after = [encoded(one.process) for one in small.encoders]
    done = sum(after) - sum(before)
    gone = sum(dropped(one.process) for one in small.encoders) - dropped_before
    with capsys.disabled():
        print(f"\n{what}: no encoder works after {took * 1000:.0f} ms; of {MANY} pictures "
              f"{done:.0f} encoded, {gone:.0f} counted as dropped")  # fmt: skip
    assert 0 < done < MANY
    assert gone > 0
    await asyncio.sleep(1)
    assert [encoded(one.process) for one in small.encoders] == after


async def begun(small: Fleet) -> None:
    """Waits until all encoders work, and a little longer."""
    async with asyncio.timeout(20):
        while not all(figure(one.process, QUEUED) for one in small.encoders):
            await asyncio.sleep(0.01)
    await asyncio.sleep(BEGUN_SECONDS)


QUEUED, IN_FLIGHT = "chiasm_encoder_queued_images", "chiasm_encoder_in_flight_patches"


async def nothing_in_hand(small: Fleet) -> bool:
    """What the encoders say of themselves, by the call that placement may use."""
    for one in small.encoders:
        async with open_channel(one.target) as channel:
            request = wire.plain(encoder_service_pb2.EncoderServiceGetLoadRequest())
            load = (await EncoderMethods.GET_LOAD.call(channel, request, timeout=5)).message
        if load.queued_image_count or load.in_flight_patch_count or load.active_call_count:
            return False
    return True


def encoders_idle(small: Fleet) -> bool:
    return not any(
        figure(one.process, QUEUED) or figure(one.process, IN_FLIGHT) for one in small.encoders
    )


def encoded(encoder: ServiceProcess) -> float:
    return figure(encoder, "chiasm_encoder_encoded_images_total")


def dropped(encoder: ServiceProcess) -> float:
    # Labelled, so that there is no sample before the first.
    try:
        return figure(encoder, "chiasm_encoder_dropped_total")
    except AssertionError:
        return 0
