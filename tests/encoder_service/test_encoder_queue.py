"""The queue is bounded, and work that nobody waits for costs nothing."""

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import PIL.Image
import pytest
from prometheus_client import CollectorRegistry

from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.images import DEFAULT_LIMITS
from chiasm.models.contract import (
    DEFAULT_OPTIONS,
    FixedRows,
    ImageForm,
    PixelOptions,
    Size,
)
from chiasm.models.vision import PixelInputs, VisionHalf
from chiasm.v1 import encoder_service_pb2 as pb
from encoder_service.batcher import Batcher, Interest, Load
from encoder_service.metrics import EncoderMetrics
from encoder_service.tower import Measure
from tests.encoder_service.calls import Service, picture, serving, settings_for
from tests.encoder_service.gated_tower import GatedTower

SIZE = Measure(pixel_count=40 * 30, row_count=4)
"""Of one picture in the tiny checkpoint."""


@asynccontextmanager
async def busy(
    checkpoint: Path, half: VisionHalf, **changes: Any
) -> AsyncIterator[tuple[Service, GatedTower]]:
    """A service whose tower holds one picture (of seed 0) until the block is left."""
    tower = GatedTower(half)
    async with serving(settings_for(checkpoint, **changes), tower) as service:
        with tower.held():
            first = asyncio.create_task(service.encode(picture(0)))
            assert await asyncio.to_thread(tower.waiting.wait, 10)
            yield service, tower
        await first


async def test_a_full_queue_refuses_with_a_time_to_retry(
    checkpoint: Path, half: VisionHalf
) -> None:
    async with busy(checkpoint, half, max_queue_images=2) as (service, tower):
        waiting = [asyncio.create_task(service.encode(picture(seed))) for seed in (1, 2)]
        await service.until_queued(2)
        with pytest.raises(ChiasmError, match="2 pictures wait") as refused:
            await service.encode(picture(3))
        assert refused.value.reason is Reason.QUEUE_FULL
        assert refused.value.grpc_code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.retry_after is not None
        assert refused.value.retry_after >= 0.1
        # Who waits for the same picture takes no place.
        shared = asyncio.create_task(service.encode(picture(1)))
        tower.release()
        assert len(await asyncio.gather(*waiting, shared)) == 3


@pytest.mark.parametrize(
    ("bound", "what"), [("max_queue_bytes", "bytes"), ("max_queue_patches", "patches")]
)
async def test_bytes_and_patches_bound_the_queue_too(
    checkpoint: Path, half: VisionHalf, bound: str, what: str
) -> None:
    async with busy(checkpoint, half, **{bound: 5}) as (service, _):
        alone = asyncio.create_task(service.encode(picture(1)))
        await service.until_queued(1)  # a single picture is always taken
        with pytest.raises(ChiasmError, match=what) as refused:
            await service.encode(picture(2))
        assert refused.value.reason is Reason.QUEUE_FULL
        alone.cancel()


async def test_a_cancelled_call_leaves_the_queue_uncomputed(
    checkpoint: Path, half: VisionHalf
) -> None:
    async with busy(checkpoint, half) as (service, tower):
        calls = [asyncio.create_task(service.encode(picture(seed))) for seed in (1, 2, 3)]
        await service.until_queued(3)
        for call in calls[:2]:
            call.cancel()
        await service.until_queued(1)
        tower.release()
        await calls[2]
        assert tower.encoded_images == 2  # the one in the tower, and the one still wanted
        dropped = [
            service.figure("dropped_total", stage=stage, cause="cancelled")
            for stage in ("preprocess", "forward")
        ]
        assert sum(dropped) == 2
        assert service.calls_ended("CANCELLED") == 2
        assert service.calls_ended("INTERNAL") == 0


async def test_work_past_its_deadline_is_never_computed(checkpoint: Path, half: VisionHalf) -> None:
    async with busy(checkpoint, half) as (service, tower):
        with pytest.raises(ChiasmError) as told:
            await service.encode(picture(1), deadline=0.2)
        assert told.value.reason is Reason.DEADLINE
        await service.until_queued(0)
        tower.release()
        await service.encode(picture(2))
        assert tower.encoded_images == 2
        assert service.figure("dropped_total", stage="forward", cause="deadline") == 1


@pytest.mark.parametrize("cause", ["cancelled", "deadline"])
async def test_what_nobody_waits_for_any_more_is_not_even_decoded(
    half: VisionHalf, cause: str
) -> None:
    registry = CollectorRegistry()
    settings = settings_for(Path(), decode_workers=1, queue_stretch=0).batcher
    batcher = Batcher(half, DEFAULT_LIMITS, settings, EncoderMetrics(registry))
    async with batcher.running():
        # Without a pause: all wait when the one worker comes.
        kept, left = Interest(), Interest()
        kept.join(None)
        waiter = left.join(None if cause == "cancelled" else time.monotonic())
        first, given_up, last = (
            batcher.submit(memoryview(picture(seed)), DEFAULT_OPTIONS, SIZE, "", interest)
            for seed, interest in enumerate((kept, left, kept))
        )
        if cause == "cancelled":
            left.leave(waiter)
        await asyncio.gather(first.result, last.result)
        with pytest.raises(ChiasmError) as told:
            given_up.result.result()
    assert told.value.reason is (Reason.CANCELLED if cause == "cancelled" else Reason.DEADLINE)
    assert given_up.preprocess_seconds == 0 < first.preprocess_seconds
    labels = {"stage": "preprocess", "cause": cause}
    assert registry.get_sample_value("chiasm_encoder_dropped_total", labels) == 1


async def test_no_more_pictures_are_decoded_at_once_than_there_are_workers(
    half: VisionHalf,
) -> None:
    counting = CountingTower(half)
    settings = settings_for(Path(), decode_workers=3).batcher
    batcher = Batcher(counting, DEFAULT_LIMITS, settings, EncoderMetrics(CollectorRegistry()))
    async with batcher.running():
        items = [
            batcher.submit(memoryview(picture(seed)), DEFAULT_OPTIONS, SIZE, "", wanted())
            for seed in range(12)
        ]
        await asyncio.gather(*(item.result for item in items))
    assert counting.most_at_once == 3


async def test_one_who_leaves_takes_nothing_from_the_others(
    checkpoint: Path, half: VisionHalf
) -> None:
    async with busy(checkpoint, half) as (service, tower):
        leaver = asyncio.create_task(service.encode(picture(1)))
        await service.until_queued(1)
        stayer = asyncio.create_task(service.encode(picture(1)))
        impatient = asyncio.create_task(service.encode(picture(1), deadline=0.2))
        await service.until_active(4)
        leaver.cancel()
        with pytest.raises(ChiasmError):
            await impatient
        assert (await service.load()).queued_image_count == 1
        tower.release()
        assert (await stayer).message.source == pb.ENCODE_SOURCE_SHARED
        assert tower.encoded_images == 2


async def test_a_picture_given_up_in_the_tower_is_kept_for_the_next_call(
    checkpoint: Path, half: VisionHalf
) -> None:
    tower = GatedTower(half)
    async with serving(settings_for(checkpoint), tower) as service:
        with tower.held():
            leaver = asyncio.create_task(service.encode(picture(1)))
            assert await asyncio.to_thread(tower.waiting.wait, 10)
            leaver.cancel()
            await service.until_active(0)
        reply = await service.encode(picture(1))
        assert tower.encoded_images == 1
    assert reply.message.source in {pb.ENCODE_SOURCE_SHARED, pb.ENCODE_SOURCE_CACHE}


async def test_the_load_tells_what_waits_and_what_runs(checkpoint: Path, half: VisionHalf) -> None:
    async with busy(checkpoint, half) as (service, tower):
        call = asyncio.create_task(service.encode(picture(1)))
        await service.until_queued(1)
        load = await service.load()
        assert (load.queued_patch_count, load.in_flight_patch_count) == (4, 4)
        assert (load.active_call_count, load.draining) == (2, False)
        tower.release()
        await call
        load = await service.load()
        assert load == pb.EncoderServiceGetLoadResponse()


async def test_what_waits_when_the_batcher_stops_is_told_so(half: VisionHalf) -> None:
    tower = GatedTower(half)
    settings = settings_for(Path()).batcher
    batcher = Batcher(tower, DEFAULT_LIMITS, settings, EncoderMetrics(CollectorRegistry()))
    with tower.held():
        async with batcher.running():
            waiting = [
                batcher.submit(memoryview(picture(seed)), DEFAULT_OPTIONS, SIZE, "", wanted())
                for seed in (1, 2)
            ]
            assert await asyncio.to_thread(tower.waiting.wait, 10)
            # Leaving waits for the tower's thread, which the gate holds.
            asyncio.get_running_loop().call_later(0.1, tower.release)
        for item in waiting:
            with pytest.raises(ChiasmError, match="stopping"):
                item.result.result()
    with pytest.raises(ChiasmError) as refused:
        batcher.submit(memoryview(picture(1)), DEFAULT_OPTIONS, SIZE, "", wanted())
    assert refused.value.reason is Reason.NOT_READY
    assert batcher.load == Load()


async def test_a_fault_of_the_processor_is_one_pictures_and_keeps_its_text(
    half: VisionHalf,
) -> None:
    narrow = copy.copy(half)
    narrow.contract = replace(half.contract, rule=NoWideRows(4))
    batcher = Batcher(
        narrow, DEFAULT_LIMITS, settings_for(Path()).batcher, EncoderMetrics(CollectorRegistry())
    )
    async with batcher.running():
        wide, tall = (
            batcher.submit(memoryview(picture(1, size)), DEFAULT_OPTIONS, SIZE, "", wanted())
            for size in ((50, 20), (20, 50))
        )
        with pytest.raises(ChiasmError) as told:
            await wide.result
        assert (await tall.result).features.rows.shape == (4, 64)
    assert told.value.message == INTERNAL_TEXT
    assert not batcher.broken.is_set()


class NoWideRows(FixedRows):
    """A rule with a bug: it cannot count the rows of a wide picture."""

    def of_size(self, size: Size, options: PixelOptions) -> ImageForm:
        height, width = size
        return super().of_size(size, options) if height > width else self.forms[0]

    @property
    def forms(self) -> tuple[ImageForm, ...]:
        return ()


class CountingTower:
    """`half`, which counts how many pictures are prepared at a time, and takes its time for it."""

    def __init__(self, half: VisionHalf) -> None:
        self._half = half
        self.contract = half.contract
        self.encode = half.encode
        self._lock = threading.Lock()
        self._at_once = 0
        self.most_at_once = 0

    def preprocess(self, image: PIL.Image.Image, options: PixelOptions) -> PixelInputs:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(0.05)
        with self._lock:
            self._at_once -= 1
        return self._half.preprocess(image, options)


def wanted() -> Interest:
    interest = Interest()
    interest.join(None)
    return interest
