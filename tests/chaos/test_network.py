"""The LLM service and its encoders in two network namespaces, with a bad wire between them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.chaos.fleet import Encoder, Fleet, idle
from tests.chaos.load import Outcome, Request, requests, send, send_all
from tests.chaos.wire import Wire, start_inside, unavailable, wire
from tests.system.processes import start_gateway, start_llm
from tests.system.three import figure, until
from tests.tiny_llava import build_tiny_llava

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

ENCODERS = 3
PORT = 50061
CALLERS = 8
REQUESTS = 150
SILENCE_SECONDS = 4.0
# A probe a second, and two of them unanswered.
LOST_WITHIN_SECONDS = SILENCE_SECONDS + 3.0
# A connection is tried again once a second, a probe at least every two.
BACK_WITHIN_SECONDS = 8.0
# While no encoder is known to be there, a picture is told so after the wait for one.
REFUSED_WITHIN_SECONDS = 2.0


class Far(Encoder):
    """An encoder service at the other end of the wire."""

    def __init__(self, model: Path, way: Wire, number: int) -> None:
        self.address = way.far(number)
        self.port = PORT
        flags = {
            "--model": str(model),
            "--host": self.address,
            "--port": str(PORT),
            "--torch-threads": "1",
            "--drain-seconds": "0",
        }
        words = [word for pair in flags.items() for word in pair]
        self.process = start_inside(way.namespace, "-m", "encoder_service", *words)

    @property
    def target(self) -> str:
        return f"{self.address}:{self.port}"


class Apart:
    """The system on both sides of the wire, and requests with the answers of a good one."""

    def __init__(self, fleet: Fleet, way: Wire) -> None:
        self.fleet = fleet
        self.way = way
        self.wanted: list[Request] = []

    def far(self, number: int) -> str:
        """The address of one of the encoders."""
        return self.way.far(number)

    async def ask(self, count: int = REQUESTS) -> Outcome:
        """Sends requests of every kind."""
        return await send_all(self.fleet, self.wanted[:count], CALLERS)

    def of_kind(self, kind: str) -> Request:
        return next(one for one in self.wanted if one.kind == kind)

    def ready(self) -> int:
        """Encoders that the LLM service asks."""
        return int(figure(self.fleet.llm, 'chiasm_llm_encoders{state="ready"}'))

    async def mend(self) -> float:
        """Makes the wire good; the seconds until all encoders are asked again."""
        self.way.set()
        return await within(BACK_WITHIN_SECONDS, lambda: self.ready() == ENCODERS)


async def within(seconds: float, done: Callable[[], bool]) -> float:
    """The seconds that it takes until `done`, at most those given."""
    took = await asyncio.to_thread(until, done, seconds)
    assert took < seconds
    return took


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    model = build_tiny_llava(tmp_path_factory.mktemp("apart") / "tiny")
    with ExitStack() as stack:
        way = stack.enter_context(wire(seed=7, far_count=ENCODERS))
        encoders: list[Encoder] = []
        for number in range(ENCODERS):
            encoders.append(Far(model, way, number))
            stack.enter_context(encoders[-1].process)
        llm = stack.enter_context(
            start_llm(
                model,
                *("--encoders", ",".join(one.target for one in encoders)),
                *("--encoder-silence-seconds", str(SILENCE_SECONDS)),
                *("--embedding-cache-bytes", "0"),
            )
        )
        gateway = stack.enter_context(start_gateway(llm.port))
        yield Apart(Fleet(encoders, [llm], gateway, model.name, stack), way)


@pytest.fixture
async def apart(system: Apart) -> AsyncIterator[Apart]:
    """The system with a good wire before and after, and nothing left in it."""
    await system.mend()
    system.wanted = system.wanted or await requests(system.fleet, REQUESTS)
    yield system
    await system.mend()
    await within(10, lambda: idle(system.fleet))


def check_all_right(outcome: Outcome) -> None:
    assert (outcome.wrong, outcome.untyped, dict(outcome.errors)) == ([], [], {})


@pytest.mark.parametrize(("delay", "loss"), [(0.0, 0.0), (0.02, 0.0), (0.0, 0.05), (0.02, 0.05)])
async def test_a_wire_that_is_slow_and_loses_packets_fails_no_request(
    apart: Apart, delay: float, loss: float, capsys: pytest.CaptureFixture[str]
) -> None:
    apart.way.set(delay=delay, loss=loss)
    outcome = await apart.ask()
    with capsys.disabled():
        print(f"\n{delay * 1000:.0f} ms each way, {loss:.0%} lost: {outcome.told()}")
    check_all_right(outcome)
    # Late or lost packets are no reason to give an encoder up.
    assert apart.ready() == ENCODERS


async def test_an_encoder_that_is_cut_off_fails_no_request_and_is_back_when_it_can_be_reached(
    apart: Apart, capsys: pytest.CaptureFixture[str]
) -> None:
    async with asking(apart) as outcome:
        apart.way.set(cut=[apart.far(0)])
        lost = await within(LOST_WITHIN_SECONDS, lambda: apart.ready() == ENCODERS - 1)
        await asyncio.sleep(2)
        back = await apart.mend()
        await asyncio.sleep(1)
    with capsys.disabled():
        print(f"\none cut off: given up after {lost:.1f} s, back after {back:.1f} s; "
              f"{outcome.told()}")  # fmt: skip
    check_all_right(outcome)
    assert "encoder ejected" in apart.fleet.llm.log()
    assert apart.fleet.encoders[0].target in apart.fleet.llm.log()


async def test_with_all_encoders_cut_off_pictures_are_a_503_and_text_runs_on(
    apart: Apart, capsys: pytest.CaptureFixture[str]
) -> None:
    async with apart.fleet.http() as http:
        apart.way.set(cut=[apart.far(number) for number in range(ENCODERS)])
        began = time.monotonic()
        first = await post(http, apart.of_kind("picture"))
        told_after = time.monotonic() - began
        check_no_encoder(first)
        assert told_after < LOST_WITHIN_SECONDS + REFUSED_WITHIN_SECONDS
        await within(LOST_WITHIN_SECONDS, lambda: apart.ready() == 0)
        began = time.monotonic()
        check_no_encoder(await post(http, apart.of_kind("pictures")))
        later_after = time.monotonic() - began
        assert later_after < REFUSED_WITHIN_SECONDS
        outcome = Outcome()
        for kind in ("text", "embedding"):
            await send(http, apart.of_kind(kind), outcome)
        back = await apart.mend()
        await send(http, apart.of_kind("picture"), outcome)
    with capsys.disabled():
        print(f"\nall cut off: 503 after {told_after:.1f} s, then after {later_after:.2f} s; "
              f"back after {back:.1f} s; {outcome.told()}")  # fmt: skip
    check_all_right(outcome)


async def post(http: httpx.AsyncClient, request: Request) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=request.body)


def check_no_encoder(response: httpx.Response) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_encoder")
    assert int(response.headers["retry-after"]) >= 1


@asynccontextmanager
async def asking(apart: Apart) -> AsyncIterator[Outcome]:
    """Callers go on asking while inside."""
    outcome, done = Outcome(), asyncio.Event()

    async def ask() -> None:
        while not done.is_set():
            await send_all(apart.fleet, apart.wanted[:40], CALLERS, outcome)

    work = asyncio.create_task(ask())
    try:
        yield outcome
    finally:
        done.set()
        await work
