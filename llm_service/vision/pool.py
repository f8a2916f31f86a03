"""The remote vision source: a fleet of encoder services that changes while it serves.

Discovery says which there are, `placement` which to ask first, `standing` which may be asked,
`attempts` what a failure means and how often to try again. This module ties them together.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from chiasm import telemetry
from chiasm.errors import ChiasmError, Reason
from chiasm.models.contract import ImageContract
from chiasm.rpc.context import seconds_left
from chiasm.rpc.secure_channel import ClientTls
from chiasm.tracing import names, spans
from llm_service import traces
from llm_service.vision.attempts import (
    Attempts,
    Latencies,
    Lie,
    RetryBudget,
    Silence,
    judge,
    told,
)
from llm_service.vision.discovery import Discovery
from llm_service.vision.encoder import Encoder, EncoderSettings
from llm_service.vision.fleet_metrics import FleetMetrics
from llm_service.vision.placement import Seat, order
from llm_service.vision.race import first_good
from llm_service.vision.source import Fetched, Sought
from llm_service.vision.standing import Cause, Standing, too_slow

# At most this many probes a second, over the whole fleet.
_PROBES_PER_SECOND = 200
_LEAST_PROBE_SECONDS = 1.0
_HEDGE_QUANTILE = 0.95
_RETRY_SHARE, _RETRY_RESERVE = 0.2, 100.0


@dataclass(frozen=True)
class PoolSettings:
    """How the fleet is asked.

    Attributes:
        encoder: how each encoder is watched and asked.
        attempts: most encoders that are asked for one picture.
        wait_seconds: how long pictures wait for an encoder once there is none to ask.
        hedge: whether a picture is asked for a second time when its answer is late.
    """

    encoder: EncoderSettings
    attempts: int
    wait_seconds: float
    hedge: bool


class EncoderPool:
    """Encoder services behind one LLM service. Make it on the event loop that uses it."""

    def __init__(
        self,
        discovery: Discovery,
        contract: ImageContract,
        settings: PoolSettings,
        metrics: FleetMetrics,
        tls: ClientTls | None = None,
    ) -> None:
        self._contract = contract
        self._tls = tls
        self._settings = settings
        self._metrics = metrics
        self._encoders: dict[str, Encoder] = {}
        self._changed = asyncio.Condition()
        # time.monotonic() since which there has been nobody to ask; None while there is somebody.
        self._bare_since: float | None = time.monotonic()
        self._budget = RetryBudget(_RETRY_SHARE, _RETRY_RESERVE)
        self._latencies = Latencies()
        self._tasks: set[asyncio.Task[None]] = set()
        self._following = asyncio.create_task(self._follow(discovery))
        metrics.watch(self.standings, lambda: sum(one.outstanding for one in self._fleet))

    @property
    def _fleet(self) -> Iterable[Encoder]:
        return self._encoders.values()

    def standings(self) -> list[Standing]:
        """The standing of every encoder that discovery names."""
        return [encoder.standing for encoder in self._fleet]

    async def encode(self, sought: Sought) -> Fetched:
        """The rows of a picture from the first encoder that gives them.

        Raises ChiasmError: a fault of the picture, QUEUE_FULL, NO_ENCODER, ENCODER_MISMATCH,
        DEADLINE, or INTERNAL for a failure that an encoder told or an answer that was wrong.
        """
        began = time.monotonic()
        attempts = Attempts(self._settings.attempts)
        self._budget.earn()
        while (encoder := await self._next(sought, attempts)) is not None:
            try:
                fetched = await self._ask(encoder, sought, attempts)
            except (ChiasmError, Lie, Silence) as error:
                if not attempts.go_on(error) or seconds_left(sought.asked.deadline) <= 0:
                    break
            else:
                return replace(fetched, fetch_seconds=time.monotonic() - began)
        raise told(attempts.failures) if attempts.failures else self._nobody()

    def _nobody(self) -> ChiasmError:
        """What a caller is told where no encoder could be asked."""
        fleet = list(self._fleet)
        if not fleet or any(one.standing.state != "foreign" for one in fleet):
            return told([])
        found, expected = fleet[0].found, self._contract.expected_identity
        text = (
            f"This model takes the encoder {expected.describe()}, but what serves is "
            f"{'an unreadable identity' if found is None else found.describe()}. Start both with "
            "one checkpoint, name, type and background."
        )
        return ChiasmError(Reason.ENCODER_MISMATCH, text, metadata={"origin": "encoder"})

    async def close(self) -> None:
        tasks = [self._following, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(encoder.close() for encoder in self._fleet))

    async def _next(self, sought: Sought, attempts: Attempts) -> Encoder | None:
        """The encoder to ask now; None if there is none, or enough were asked."""
        if attempts.over:
            return None
        chosen = self._choose(sought, attempts)
        if chosen is None and not attempts.refused:
            chosen = await self._wait_for_one(sought, attempts)
        if chosen is None or not attempts.failures:
            return chosen
        if not self._budget.spend():
            self._metrics.unaffordable.inc()
            return None
        self._metrics.retries.inc()
        return chosen

    def _choose(self, sought: Sought, attempts: Attempts) -> Encoder | None:
        possible = [
            one
            for one in self._fleet
            if one.standing.ready and attempts.allow(one.address, one.standing.proved_at)
        ] or [
            one
            for one in self._fleet
            if one.standing.last_resort and attempts.allow(one.address, 0)
        ]
        if not possible:
            return None
        seats = [Seat(one.address, one.outstanding) for one in possible]
        return possible[order(seats, sought.digest)[0]]

    async def _wait_for_one(self, sought: Sought, attempts: Attempts) -> Encoder | None:
        """Waits for an encoder that is just being found, not for a fleet known to be gone."""
        if self._bare_since is None:
            return None
        limit = self._bare_since + self._settings.wait_seconds - time.monotonic()
        limit = min(limit, seconds_left(sought.asked.deadline))
        try:
            async with asyncio.timeout(max(0, limit)), self._changed:
                while (chosen := self._choose(sought, attempts)) is None:
                    await self._changed.wait()
                return chosen
        except TimeoutError:
            return None

    async def _ask(self, encoder: Encoder, sought: Sought, attempts: Attempts) -> Fetched:
        late = self._latencies.quantile(_HEDGE_QUANTILE) if self._settings.hedge else None
        first = self._judged(encoder, sought, attempts)
        if late is None:
            return await first
        return await first_good(first, late, lambda: self._hedge(sought, attempts))

    def _hedge(self, sought: Sought, attempts: Attempts) -> Coroutine[Any, Any, Fetched] | None:
        other = self._choose(sought, attempts)
        if other is None or not self._budget.spend():
            return None
        self._metrics.hedges.inc()
        return self._judged(other, sought, attempts)

    async def _judged(self, encoder: Encoder, sought: Sought, attempts: Attempts) -> Fetched:
        """One attempt, with what its end says about the encoder."""
        attempts.begin(encoder.address, time.monotonic())
        with spans.stage(names.ASK_ENCODER, kind="client") as span:
            traces.asks(span, encoder.address)
            try:
                fetched = await encoder.ask(sought)
            except (ChiasmError, Lie, Silence) as error:
                self._blame(encoder, error)
                raise
            traces.transferred(span, fetched, time.monotonic())
        self._metrics.attempts.labels("answered").inc()
        self._metrics.received(fetched)
        self._latencies.add(fetched.fetch_seconds)
        if too_slow(encoder.standing, self.standings()):
            encoder.eject(Cause.SLOW, f"{fetched.fetch_seconds:.2f} s for the last picture")
        return fetched

    def _blame(self, encoder: Encoder, error: Exception) -> None:
        judgement = judge(error)
        self._metrics.attempts.labels(judgement.label).inc()
        if judgement.cause is not None:
            encoder.eject(judgement.cause, str(error))
        elif judgement.counted:
            encoder.failed(str(error))

    async def _follow(self, discovery: Discovery) -> None:
        async for addresses in discovery.addresses():
            gone = [self._encoders.pop(one) for one in set(self._encoders) - addresses]
            new = sorted(addresses - set(self._encoders))
            for encoder in gone:
                self._keep(encoder.retire())
            for address in new:
                self._encoders[address] = self._open(address)
            self._note_bareness()
            telemetry.logger().info(
                "encoders", added=new, removed=[one.address for one in gone], count=len(addresses)
            )

    def _open(self, address: str) -> Encoder:
        settings = self._settings.encoder
        return Encoder(
            address,
            self._contract,
            settings,
            self._on_change,
            self._probe_interval,
            self._others_ready,
            self._tls,
        )

    def _others_ready(self, encoder: Encoder) -> bool:
        return any(one.standing.ready for one in self._fleet if one is not encoder)

    def _probe_interval(self) -> float:
        return max(_LEAST_PROBE_SECONDS, len(self._encoders) / _PROBES_PER_SECOND)

    def _on_change(self, cause: Cause | None) -> None:
        if cause is not None:
            self._metrics.ejections.labels(cause.value).inc()
        self._note_bareness()
        self._keep(self._tell_waiting())

    def _note_bareness(self) -> None:
        if any(one.standing.ready or one.standing.last_resort for one in self._fleet):
            self._bare_since = None
        elif self._bare_since is None:
            self._bare_since = time.monotonic()

    async def _tell_waiting(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
