"""Two thousand requests while encoders are killed, stopped and restarted; rolling restarts."""

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import cycle, takewhile
from pathlib import Path

import pytest

from tests.chaos.fleet import Chaos, Fleet, fleet, held, idle, in_thread
from tests.chaos.load import Outcome, requests, send_all
from tests.system.processes import start_llm
from tests.system.three import figure, until
from tests.tiny_llava import build_tiny_llava

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

# At least so many of both.
REQUESTS, FAULTS = 2000, 12
CALLERS = 16
# Threads and descriptors that libraries renew; bytes that the allocator keeps.
SLACK, SLACK_BYTES = 8, 96 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llava(tmp_path_factory.mktemp("chaos") / "tiny")


@pytest.fixture(scope="module")
def four(checkpoint: Path) -> Iterator[Fleet]:
    with fleet(checkpoint, 4) as made:
        yield made


async def test_2000_requests_are_answered_rightly_while_encoders_die_one_at_a_time(
    four: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = await requests(four, REQUESTS)
    await send_all(four, wanted[:200], CALLERS)
    assert until(lambda: idle(four)) < 10
    before = [held(process) for process in (four.llm, four.gateway)]
    chaos = Chaos(four.encoders, seed=3)
    hurting = asyncio.create_task(chaos.run())
    began = time.monotonic()
    # More requests than that if they are done before the faults.
    ongoing = cycle(wanted)
    enough = takewhile(
        lambda sent: sent[0] < REQUESTS or len(chaos.faults) < FAULTS, enumerate(ongoing)
    )
    outcome = await send_all(four, (request for _, request in enough), CALLERS)
    seconds = time.monotonic() - began
    chaos.end()
    await hurting
    with capsys.disabled():
        print(f"\n{len(chaos.faults)} faults in {seconds:.0f} s; {outcome.told()}")
        print(*_figures(four), sep="; ")
    check_all_right(outcome, REQUESTS)
    assert {"kill", "stop"} <= set(chaos.faults)
    assert until(lambda: idle(four)) < 10
    for then, process in zip(before, (four.llm, four.gateway), strict=True):
        now = held(process)
        assert now.threads <= then.threads + SLACK, (then, now)
        assert now.descriptors <= then.descriptors + SLACK, (then, now)
        assert now.resident <= then.resident + SLACK_BYTES, (then, now)


async def test_a_rolling_restart_of_all_encoders_fails_no_request(
    four: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    def roll() -> None:
        for encoder in four.encoders:
            encoder.roll()

    outcome = await under_load(four, roll)
    with capsys.disabled():
        print(f"\nencoders rolled: {outcome.told()}")
    check_all_right(outcome)


async def test_a_rolling_restart_of_the_llm_services_behind_a_gateway_fails_no_request(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fleet(checkpoint, 2, llm_count=2, llm_flags=("--drain-seconds", "2")) as two:

        def roll() -> None:
            for at, llm in enumerate(two.llms):
                llm.terminate()
                assert llm.wait(60) == 0
                command = list(llm.command)
                flags = [*command[command.index("--encoders") :], "--port", str(llm.port)]
                two.llms[at] = two.stack.enter_context(start_llm(checkpoint, *flags))
                # The gateway's channel looks for it about once a second.
                time.sleep(3)

        outcome = await under_load(two, roll)
        with capsys.disabled():
            print(f"\nLLM services rolled: {outcome.told()}")
        check_all_right(outcome)


async def under_load(fleet: Fleet, work: Callable[[], None]) -> Outcome:
    """Callers go on asking until `work`, in a thread, has ended."""
    wanted = await requests(fleet, 200)
    outcome, done = Outcome(), asyncio.Event()

    async def ask() -> None:
        while not done.is_set():
            await send_all(fleet, wanted[:50], 8, outcome)

    asking = asyncio.create_task(ask())
    try:
        await in_thread(work)
    finally:
        done.set()
        await asking
    return outcome


def check_all_right(outcome: Outcome, least: int = 1) -> None:
    assert not outcome.wrong
    assert not outcome.untyped
    assert not outcome.errors
    assert sum(outcome.right.values()) >= least


def _figures(fleet: Fleet) -> list[str]:
    names = ("attempts", "retries", "retries_refused", "ejections")
    return [f"{name} {figure(fleet.llm, f'chiasm_llm_encoder_{name}_total'):.0f}" for name in names]
