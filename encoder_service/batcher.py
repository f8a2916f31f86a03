"""The way of a picture through the encoder: queue, decode threads, tower thread.

    submit -> arrived -> (decode threads) -> ready -> (tower thread) -> the item's own future

Both lines have the order of `encoder_service.order`, by what a picture costs there. With a forward
for each picture the tower takes one at a time; else what waits when it becomes free, up to a budget
of patches: nothing waits for a batch to fill. Everything but the two kinds of work runs on the
event loop, so that no state is shared between threads. An item that nobody waits for any more is
dropped before either stage.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal

from chiasm import telemetry
from chiasm.errors import INTERNAL_TEXT, ChiasmError, Reason
from chiasm.images import ImageLimits
from chiasm.models.contract import PixelOptions
from chiasm.models.vision import ImageFeatures, PixelInputs
from encoder_service.metrics import EncoderMetrics
from encoder_service.order import Line, Rate, key_of
from encoder_service.settings import BatcherSettings
from encoder_service.tower import Measure, Outcome, Tower, forward, measure, prepare

Stage = Literal["preprocess", "forward"]
Cause = Literal["cancelled", "deadline"]

_STOPPING = "This encoder is stopping; ask another."
# Bounds of the retry hint, in seconds.
_SOONEST_RETRY, _LATEST_RETRY = 0.1, 30.0


class Interest:
    """Who waits for an item, each until a time of its own (time.monotonic; None: for ever)."""

    def __init__(self) -> None:
        self._deadlines: dict[object, float | None] = {}
        self._last_cause: Cause = "cancelled"

    def join(self, deadline: float | None) -> object:
        waiter = object()
        self._deadlines[waiter] = deadline
        return waiter

    def leave(self, waiter: object) -> None:
        self._last_cause = "deadline" if _passed(self._deadlines.pop(waiter)) else "cancelled"

    def lost(self) -> Cause | None:
        """Why nobody waits any more; None while somebody does."""
        if not self._deadlines:
            return self._last_cause
        return "deadline" if all(map(_passed, self._deadlines.values())) else None


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one picture spent in each stage, and when (time.monotonic) it came to each."""

    preprocess: float = 0.0
    queue: float = 0.0
    forward: float = 0.0
    arrived_at: float = 0.0
    decoding_at: float = 0.0
    forward_at: float = 0.0


@dataclass(frozen=True)
class Encoded:
    """One encoded picture with the time it took."""

    features: ImageFeatures
    times: StageTimes


@dataclass(eq=False)
class Item:
    """A picture in the queue, with its reply channel and those who wait for it."""

    data: memoryview
    options: PixelOptions
    request_id: str
    interest: Interest
    result: "asyncio.Future[Encoded]"
    pixel_count: int
    # Estimated until the picture is decoded.
    patches: int
    # time.monotonic() of its coming, and of the last change of stage.
    arrival: float
    since: float
    waited: float = 0.0
    decoding_at: float = 0.0
    preprocess_seconds: float = 0.0
    queued: bool = True
    # The stage that has not begun yet.
    ahead: Stage = "preprocess"
    pixels: PixelInputs | None = None


class WaitingLine(Line[Item]):
    """A line that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._some = asyncio.Event()

    def put(self, item: Item, key: float) -> None:
        super().put(item, key)
        self._some.set()

    async def filled(self) -> None:
        """Returns while there is an item: take it before the next await."""
        while not len(self):
            self._some.clear()
            await self._some.wait()


@dataclass
class Load:
    """The work in hand. Only queued items count in the first three."""

    images: int = 0
    data_bytes: int = 0
    patches: int = 0
    in_flight_patches: int = 0

    def enter(self, item: Item) -> None:
        self.images += 1
        self.data_bytes += item.data.nbytes
        self.patches += item.patches

    def leave(self, item: Item) -> None:
        self.images -= 1
        self.data_bytes -= item.data.nbytes
        self.patches -= item.patches


class Batcher:
    """Encodes pictures of many calls. Use inside `running`."""

    def __init__(
        self, tower: Tower, limits: ImageLimits, settings: BatcherSettings, metrics: EncoderMetrics
    ) -> None:
        self._tower = tower
        self._limits = limits
        self._settings = settings
        self._metrics = metrics
        self._arrived, self._ready = WaitingLine(), WaitingLine()
        self._decoders = ThreadPoolExecutor(settings.decode_workers, "decode")
        self._tower_thread = ThreadPoolExecutor(1, "tower")
        self._unanswered: set[Item] = set()
        # Seconds a pixel, patches a feature row, seconds a patch.
        self._decoding, self._patching, self._encoding = Rate(), Rate(), Rate()
        self._open = True
        self.load = Load()
        # Set when a loop ended by a bug: the process cannot serve any more.
        self.broken = asyncio.Event()

    async def measure(self, data: memoryview, options: PixelOptions) -> Measure:
        """What the header of a picture says. Raises ChiasmError if it is none that is served."""
        return await asyncio.to_thread(measure, self._tower, self._limits, data, options)

    def submit(
        self,
        data: memoryview,
        options: PixelOptions,
        size: Measure,
        request_id: str,
        interest: Interest,
    ) -> Item:
        """Queues a picture of `size`; its `result` gives Encoded or raises ChiasmError.

        Raises QUEUE_FULL with the time after which there may be room, or NOT_READY after the end.
        """
        if not self._open:
            raise ChiasmError(Reason.NOT_READY, _STOPPING)
        result: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        patches = max(1, round(self._patching.of(size.row_count)))
        now = time.monotonic()
        item = Item(
            data, options, request_id, interest, result, size.pixel_count, patches, now, now
        )
        self._admit(item)
        self._unanswered.add(item)
        result.add_done_callback(lambda done: self._answered(item, done))
        self._arrived.put(item, self._key(item, self._decoding.of(item.pixel_count)))
        return item

    def _key(self, item: Item, cost: float) -> float:
        return key_of(item.arrival, cost, self._settings.stretch)

    def discard_if_lost(self, item: Item) -> None:
        """Drops a queued item at once if nobody waits for it, so that its place is free."""
        if item.queued:
            self._settled(item)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Batcher"]:
        """Encodes while open; what is unanswered at the end fails with NOT_READY."""
        loops = [asyncio.create_task(self._run_tower())]
        loops += [
            asyncio.create_task(self._prepare_items()) for _ in range(self._settings.decode_workers)
        ]
        for task in loops:
            task.add_done_callback(self._loop_ended)
        try:
            yield self
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            self._refuse_all()
            for threads in (self._decoders, self._tower_thread):
                await asyncio.to_thread(threads.shutdown)

    def _loop_ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            return
        telemetry.logger().error("fault", detail="a loop ended", exc_info=task.exception())
        self._refuse_all()
        self.broken.set()

    def _refuse_all(self) -> None:
        self._open = False
        for item in list(self._unanswered):
            self._fail(item, ChiasmError(Reason.NOT_READY, _STOPPING))

    def _answered(self, item: Item, done: "asyncio.Future[Encoded]") -> None:
        self._unanswered.discard(item)
        done.exception()  # nobody may be left to hear it: that is no fault to be logged

    def _admit(self, item: Item) -> None:
        bound, load = self._settings, self.load
        for held, more, most, what in (
            (load.images, 1, bound.max_images, "pictures"),
            (load.data_bytes, item.data.nbytes, bound.max_bytes, "bytes of pictures"),
            (load.patches, item.patches, bound.max_patches, "patches"),
        ):
            # An empty queue takes any one picture.
            if load.images and held + more > most:
                raise ChiasmError(
                    Reason.QUEUE_FULL,
                    f"{held} {what} wait and at most {most} may; try again later.",
                    retry_after=self._until_room(),
                )
        load.enter(item)
        self._observe_queue()

    def _until_room(self) -> float:
        backlog = self.load.patches + self.load.in_flight_patches
        return min(max(self._encoding.of(backlog), _SOONEST_RETRY), _LATEST_RETRY)

    async def _prepare_items(self) -> None:
        while True:
            await self._arrived.filled()
            item = self._arrived.take()
            if not self._settled(item):
                await self._prepare(item)

    async def _prepare(self, item: Item) -> None:
        began = item.decoding_at = self._end_wait(item)
        item.ahead = "forward"
        try:
            pixels = await asyncio.get_running_loop().run_in_executor(
                self._decoders, prepare, self._tower, self._limits, item.data, item.options
            )
        except Exception as error:
            self._fail(item, error)
            return
        item.since = time.monotonic()
        item.preprocess_seconds = item.since - began
        self._metrics.stage_seconds.labels("preprocess").observe(item.preprocess_seconds)
        self._decoding = self._decoding.with_seen(item.pixel_count, item.preprocess_seconds)
        self._patching = self._patching.with_seen(pixels.placeholder_count, pixels.patch_count)
        self._weigh(item, pixels.patch_count)
        item.pixels = pixels
        if not self._settled(item):
            self._ready.put(item, self._key(item, self._encoding.of(item.patches)))

    def _weigh(self, item: Item, patches: int) -> None:
        if item.queued:
            self.load.patches += patches - item.patches
        item.patches = patches
        self._observe_queue()

    async def _run_tower(self) -> None:
        while True:
            batch = await self._next_batch()
            for group in self._forwards(batch):
                wanted = [item for item in group if not self._settled(item)]
                if wanted:
                    await self._encode(wanted)

    async def _next_batch(self) -> list[Item]:
        while not (batch := self._take()):
            await self._ready.filled()
        self._metrics.batch_images.observe(len(batch))
        self._metrics.batch_patches.observe(sum(item.patches for item in batch))
        return batch

    def _take(self) -> list[Item]:
        batch: list[Item] = []
        room = self._settings.max_batch_patches
        alone = self._settings.bit_exact
        while (item := self._ready.first()) and not (batch and (alone or item.patches > room)):
            self._ready.discard(item)
            if not self._settled(item):
                batch.append(item)
                room -= item.patches
        return batch

    def _forwards(self, batch: list[Item]) -> list[list[Item]]:
        # The tower stacks pictures of one shape only: the others are forwards of their own, and
        # nobody waits for those that come after.
        work = attrgetter("patches")
        return [list(group) for _, group in groupby(sorted(batch, key=work), key=work)]

    async def _encode(self, group: list[Item]) -> None:
        pixels = [item.pixels for item in group if item.pixels is not None]
        for item in group:
            self._end_wait(item)
            self._unqueue(item)
        patches = sum(item.patches for item in group)
        began = time.monotonic()
        with self._in_flight(patches):
            outcomes = await asyncio.get_running_loop().run_in_executor(
                self._tower_thread, forward, self._tower, pixels, self._settings.bit_exact
            )
        seconds = time.monotonic() - began
        self._encoding = self._encoding.with_seen(patches, seconds)
        for item, outcome in zip(group, outcomes, strict=True):
            self._publish(item, outcome, began, seconds)

    def _publish(self, item: Item, outcome: Outcome, began: float, seconds: float) -> None:
        item.pixels = None
        self._metrics.encoded.inc()
        self._metrics.stage_seconds.labels("forward").observe(seconds)
        self._metrics.stage_seconds.labels("queue").observe(item.waited)
        if isinstance(outcome, Exception):
            self._fail(item, outcome)
        elif not item.result.done():
            times = StageTimes(
                item.preprocess_seconds, item.waited, seconds, item.arrival, item.decoding_at, began
            )
            item.result.set_result(Encoded(outcome, times))

    def _settled(self, item: Item) -> bool:
        """Whether the item is answered; drops it if nobody waits for it any more."""
        cause = item.interest.lost()
        if cause is not None and not item.result.done():
            self._metrics.dropped.labels(item.ahead, cause).inc()
            reason = Reason.DEADLINE if cause == "deadline" else Reason.CANCELLED
            self._fail(item, ChiasmError(reason, "Nobody waited for this picture any more."))
        return item.result.done()

    def _fail(self, item: Item, error: Exception) -> None:
        self._unqueue(item)
        item.pixels = None
        self._arrived.discard(item)
        self._ready.discard(item)
        if not isinstance(error, ChiasmError):
            telemetry.logger().error("fault", request_id=item.request_id, exc_info=error)
            error = ChiasmError(Reason.INTERNAL, INTERNAL_TEXT)
        if not item.result.done():
            item.result.set_exception(error)

    def _end_wait(self, item: Item) -> float:
        now = time.monotonic()
        item.waited += now - item.since
        return now

    def _unqueue(self, item: Item) -> None:
        if item.queued:
            item.queued = False
            self.load.leave(item)
            self._observe_queue()

    @contextmanager
    def _in_flight(self, patches: int) -> Iterator[None]:
        self.load.in_flight_patches = patches
        self._metrics.in_flight_patches.set(patches)
        try:
            yield
        finally:
            self.load.in_flight_patches = 0
            self._metrics.in_flight_patches.set(0)

    def _observe_queue(self) -> None:
        self._metrics.queued_images.set(self.load.images)
        self._metrics.queued_bytes.set(self.load.data_bytes)
        self._metrics.queued_patches.set(self.load.patches)


def _passed(deadline: float | None) -> bool:
    return deadline is not None and deadline <= time.monotonic()
