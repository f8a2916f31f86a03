"""Many callers at once: every answer right, no picture encoded twice, nothing left behind."""

import asyncio
import io
from dataclasses import dataclass

import pytest

from chiasm.conversation import Message, Sampling, user
from demo_model.pictures import draw, sample_scene
from demo_model.questions import answer_of
from tests.system.footprint import descriptor_count, thread_count
from tests.system.three import Three, asked, figure, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CALLERS = 64
DISTINCT = 8
QUESTION = "What is in the picture?"
# Seeds of held-out scenes that no other test asks about.
FIRST_SEED = 700_000
WARM_SEED = 800_000
# A connection that a library renews, a thread that it starts late.
SLACK = 3


@dataclass(frozen=True)
class Left:
    """What the three processes hold, in their order."""

    threads: tuple[int, ...]
    descriptors: tuple[int, ...]

    def exceeds(self, before: "Left") -> bool:
        pairs = zip(
            (*self.threads, *self.descriptors), (*before.threads, *before.descriptors), strict=True
        )
        return any(now > then + SLACK for now, then in pairs)


def left(system: Three) -> Left:
    return Left(
        tuple(thread_count(process) for process in system.processes),
        tuple(descriptor_count(process) for process in system.processes),
    )


def idle(system: Three) -> bool:
    """Whether no call is in hand anywhere and every block of keys and values is free."""
    return (
        figure(system.llm, "chiasm_llm_kv_blocks_used") == 0
        and figure(system.llm, "chiasm_rpc_active_calls") == 0
        and figure(system.encoder, "chiasm_rpc_active_calls") == 0
        and figure(system.encoder, "chiasm_encoder_queued_images") == 0
        # The scrape itself is one.
        and figure(system.gateway, "chiasm_gateway_active_requests") <= 1
    )


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    draw(sample_scene("held-out", seed)).save(file, "PNG")
    return file.getvalue()


def turns(seed: int) -> list[Message]:
    return [user(picture(seed), QUESTION)]


async def all_at_once(system: Three, seeds: list[int]) -> list[str]:
    bodies = [system.body(turns(seed)) for seed in seeds]
    async with system.http() as http:
        return await asyncio.gather(*(asked(http, body) for body in bodies))


async def alone(system: Three, seed: int) -> str:
    """The answer to one request by itself; a tenant of its own shares no cached features."""
    async with system.client(tenant="alone") as client:
        return (await client.generate(turns(seed), Sampling(temperature=0))).text


async def test_64_callers_with_8_pictures_are_answered_rightly_with_8_encodes(demo: Three) -> None:
    # Worker threads start at first use: only what comes beyond a first wave is a leak.
    await all_at_once(demo, [WARM_SEED] * CALLERS)
    assert until(lambda: idle(demo)) < 10
    before = left(demo)
    encoded_before = figure(demo.encoder, "chiasm_encoder_encoded_images_total")

    seeds = [FIRST_SEED + number % DISTINCT for number in range(CALLERS)]
    answers = await all_at_once(demo, seeds)
    encoded = figure(demo.encoder, "chiasm_encoder_encoded_images_total") - encoded_before
    assert 0 < encoded <= DISTINCT

    expected = {seed: await alone(demo, seed) for seed in set(seeds)}
    assert answers == [expected[seed] for seed in seeds]
    truth = {seed: answer_of(sample_scene("held-out", seed), "kind") for seed in set(seeds)}
    assert len(set(truth.values())) > 1
    assert expected == truth

    assert until(lambda: idle(demo)) < 10
    until(lambda: not left(demo).exceeds(before))
    assert not left(demo).exceeds(before), (before, left(demo))
