"""The order of work: cheap pictures pass dear ones, and nobody waits without bound."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from chiasm.images import DEFAULT_LIMITS
from chiasm.models.contract import DEFAULT_OPTIONS
from chiasm.models.vision import VisionHalf
from encoder_service.batcher import Batcher, Interest, Item, Load
from encoder_service.metrics import EncoderMetrics
from encoder_service.order import Line, Rate, key_of
from encoder_service.settings import EncoderSettings
from tests.encoder_service.calls import Service, picture, serving, settings_for, until_prepared
from tests.encoder_service.gated_tower import GatedTower
from tests.families.zoo import qwen2_vl


@dataclass(frozen=True)
class Work:
    """A picture of the simulation; whole numbers, so that nothing is rounded."""

    number: int
    arrival: int
    cost: int


def works(pairs: Sequence[tuple[int, int]]) -> list[Work]:
    arrived = sorted(pairs)
    return [Work(number, arrival, cost) for number, (arrival, cost) in enumerate(arrived)]


def served(line_of_work: Sequence[Work], stretch: int) -> dict[Work, int]:
    """When each is begun by one who serves whoever waits, one after the other."""
    line: Line[Work] = Line()
    coming, began, now = list(line_of_work), {}, 0
    while coming or len(line):
        if not len(line):
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            one = coming.pop(0)
            line.put(one, key_of(one.arrival, one.cost, stretch))
        one = line.take()
        began[one] = now
        now += one.cost
    return began


ARRIVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=30).map(works)
STRETCHES = st.integers(0, 10)


@given(ARRIVALS, STRETCHES)
def test_nobody_is_passed_by_those_who_come_a_stretch_of_its_cost_after_it(
    pictures: list[Work], stretch: int
) -> None:
    began = served(pictures, stretch)
    for one in pictures:
        for later in pictures[one.number + 1 :]:
            if began[later] < began[one]:
                assert later.arrival <= one.arrival + stretch * (one.cost - later.cost)


@given(ARRIVALS, STRETCHES)
def test_one_waits_longer_than_first_come_first_served_by_the_work_of_its_stretch_at_most(
    pictures: list[Work], stretch: int
) -> None:
    began, fair = served(pictures, stretch), served(pictures, 0)
    for one in pictures:
        until = one.arrival + stretch * one.cost
        passing = sum(later.cost for later in pictures[one.number + 1 :] if later.arrival <= until)
        assert began[one] <= fair[one] + passing


@given(ARRIVALS, STRETCHES)
def test_a_dear_one_goes_before_a_cheap_one_only_if_it_waited_for_it_or_had_begun(
    pictures: list[Work], stretch: int
) -> None:
    began = served(pictures, stretch)
    for cheap in pictures:
        for dear in pictures:
            waited = cheap.arrival - dear.arrival >= stretch * (dear.cost - cheap.cost)
            if dear.cost > cheap.cost and cheap.arrival <= began[dear] < began[cheap]:
                assert waited


@given(ARRIVALS)
def test_without_stretch_and_among_equals_the_first_to_come_is_first(pictures: list[Work]) -> None:
    equals = [replace(one, cost=3) for one in pictures]
    for one, stretch in ((pictures, 0), (equals, 7)):
        assert list(served(one, stretch)) == one


@given(st.lists(st.one_of(st.integers(0, 40), st.just("take"))))
def test_a_line_is_what_a_sorted_list_would_be(steps: list[int | str]) -> None:
    line: Line[int] = Line()
    expected: list[int] = []
    for step in steps:
        if isinstance(step, str):
            assert line.first() == (expected[0] if expected else None)
            if expected:
                assert line.take() == expected.pop(0)
        elif step in expected:
            line.discard(step)
            expected.remove(step)
        else:
            line.discard(step)  # it is not there: nothing happens
            line.put(step, step // 4)
            expected.append(step)
            expected.sort(key=lambda item: item // 4)  # stable, as the line is
        assert len(line) == len(expected)


def test_a_rate_follows_what_was_seen_and_large_work_counts_for_more() -> None:
    assert Rate().of(10) == 0
    rate = Rate().with_seen(1000, 1.0).with_seen(1, 1.0)  # a tiny one with its fixed cost
    assert rate.of(1000) == pytest.approx(1000 * 1.8 / 801)
    for _ in range(100):
        rate = rate.with_seen(10, 5.0)
    assert rate.of(2) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def many_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tower takes pictures of many sizes: 8 to 240 patches."""
    directory = tmp_path_factory.mktemp("many_sizes")
    qwen2_vl.build(directory)
    return directory


HUGE, SMALL = (480, 440), (56, 28)
MUCH = 1e9
"""A stretch beyond any time between two calls of a test."""


@pytest.mark.parametrize(("stretch", "order"), [(MUCH, ["small", "huge"]), (0, ["huge", "small"])])
@pytest.mark.parametrize("bit_exact", [True, False])
async def test_a_small_picture_passes_a_huge_one_before_the_tower_as_far_as_the_stretch_allows(
    many_sizes: Path, stretch: float, order: list[str], bit_exact: bool
) -> None:
    # A budget that holds one of the two: else they are one batch.
    settings = settings_for(
        many_sizes, queue_stretch=stretch, bit_exact=bit_exact, max_batch_patches=8
    )
    tower = GatedTower(VisionHalf.load(many_sizes, model_id="tiny"))
    async with serving(settings, tower) as service:
        assert await order_of_answers(service, tower) == order


async def order_of_answers(service: Service, tower: GatedTower) -> list[str]:
    """Of a huge picture and a small one that came after it, while the tower was busy."""
    done: list[str] = []

    async def ask(name: str, size: tuple[int, int]) -> None:
        await service.encode(picture(1, size))
        done.append(name)

    with tower.held():
        calls: list[asyncio.Task[Any]] = [asyncio.create_task(service.encode(picture(0, SMALL)))]
        assert await asyncio.to_thread(tower.waiting.wait, 10)
        for name, size in (("huge", HUGE), ("small", SMALL)):
            calls.append(asyncio.create_task(ask(name, size)))
            await until_prepared(service, len(calls))
        tower.release()
        await asyncio.gather(*calls)
    return done


async def test_small_pictures_of_a_batch_are_answered_before_its_huge_one(
    many_sizes: Path,
) -> None:
    tower = GatedTower(VisionHalf.load(many_sizes, model_id="tiny"))
    settings = settings_for(many_sizes, bit_exact=False, queue_stretch=0)
    async with serving(settings, tower) as service:
        before = service.figure("batch_images_count")
        assert await order_of_answers(service, tower) == ["small", "huge"]
        assert service.figure("batch_images_count") - before == 2


async def test_the_header_tells_the_patches_before_a_picture_is_decoded(many_sizes: Path) -> None:
    half = VisionHalf.load(many_sizes, model_id="tiny")
    async with batching(half, settings_for(many_sizes)) as batcher:
        await (await submitted(batcher, SMALL)).result  # patches a row are learnt from one
        for size in (HUGE, SMALL):
            item = await submitted(batcher, size)
            estimated = batcher.load.patches
            await item.result
            assert estimated == item.patches > 0
        assert batcher.load == Load()


@pytest.mark.parametrize(("stretch", "order"), [(MUCH, ["small", "huge"]), (0, ["huge", "small"])])
async def test_a_file_of_few_pixels_is_decoded_before_one_of_many_that_came_first(
    checkpoint: Path, half: VisionHalf, stretch: float, order: list[str]
) -> None:
    settings = settings_for(checkpoint, queue_stretch=stretch, decode_workers=1)
    sizes = {"huge": HUGE, "small": SMALL}
    files = [(name, memoryview(picture(3, size))) for name, size in sizes.items()]
    async with batching(half, settings) as batcher:
        await (await submitted(batcher, SMALL)).result
        measured = [await batcher.measure(data, DEFAULT_OPTIONS) for _, data in files]
        done: list[str] = []
        results = []
        # Without a pause, so that both wait when the one worker comes.
        for (name, data), size in zip(files, measured, strict=True):
            item = batcher.submit(data, DEFAULT_OPTIONS, size, "", wanted())
            item.result.add_done_callback(partial(_note, done, name))
            results.append(item.result)
        await asyncio.gather(*results)
    assert done == order


def _note(done: list[str], name: str, _: object) -> None:
    done.append(name)


def batching(half: VisionHalf, settings: EncoderSettings) -> AbstractAsyncContextManager[Batcher]:
    metrics = EncoderMetrics(CollectorRegistry())
    return Batcher(half, DEFAULT_LIMITS, settings.batcher, metrics).running()


async def submitted(batcher: Batcher, size: tuple[int, int]) -> Item:
    data = memoryview(picture(2, size))
    measured = await batcher.measure(data, DEFAULT_OPTIONS)
    return batcher.submit(data, DEFAULT_OPTIONS, measured, "", wanted())


def wanted() -> Interest:
    interest = Interest()
    interest.join(None)
    return interest
