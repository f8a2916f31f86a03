"""The encoder pool against real servers that are slow, full, gone, foreign or lying."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry

from chiasm.errors import ChiasmError, Reason
from chiasm.images import decode_image, image_size
from chiasm.models.contract import DEFAULT_OPTIONS
from chiasm.models.vision import VisionHalf
from llm_service.request import RawImage
from llm_service.vision.discovery import discovery
from llm_service.vision.encoder import EncoderSettings
from llm_service.vision.fleet_metrics import FleetMetrics
from llm_service.vision.pool import EncoderPool, PoolSettings
from llm_service.vision.source import Asked, Fetched, Sought
from tests.llm_service.conftest import png
from tests.scripted_encoder import Behaviour, ScriptedEncoder

SETTINGS = PoolSettings(
    encoder=EncoderSettings(silence_seconds=1.0, attempt_seconds=2.0),
    attempts=3,
    wait_seconds=2.0,
    hedge=False,
)
CHUNKED = replace(SETTINGS, encoder=replace(SETTINGS.encoder, unary_bytes=0))
WRONG_ANSWERS: tuple[Behaviour, ...] = (
    "too few rows",
    "rows of another size",
    "not finite",
    "another picture",
    "no identity",
    "garbage",
)
WRONG_STREAMS: tuple[Behaviour, ...] = (
    "truncated chunk",
    "wrong checksum",
    "no trailer",
    "endless chunks",
    "more than stated",
    "chunks out of order",
    "huge header",
)


@pytest.fixture(scope="module")
def half(checkpoint: Path) -> VisionHalf:
    torch.set_num_threads(1)
    return VisionHalf.load(checkpoint, model_id="tiny")


@pytest.fixture(scope="module")
def many() -> list[bytes]:
    rng = np.random.default_rng(11)
    return [png(rng.integers(0, 256, (30, 40, 3))) for _ in range(20)]


class Fleet:
    """A pool over scripted encoders."""

    def __init__(self, half: VisionHalf, pool: EncoderPool, registry: CollectorRegistry) -> None:
        self.half = half
        self.pool = pool
        self._registry = registry

    async def encode(self, picture: bytes, seconds: float = 10, request: str = "r") -> Fetched:
        width, height = image_size(memoryview(picture))
        sought = Sought(
            RawImage(memoryview(picture), DEFAULT_OPTIONS),
            hashlib.sha256(picture).digest(),
            self.half.contract.of_size((height, width), DEFAULT_OPTIONS),
            Asked("", request, time.monotonic() + seconds),
        )
        return await self.pool.encode(sought)

    def check(self, picture: bytes, fetched: Fetched) -> None:
        half = self.half
        (features,) = half.encode([half.preprocess(decode_image(picture))])
        assert torch.equal(features.rows, fetched.rows.rows)

    def count(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"chiasm_llm_encoder_{name}_total", labels) or 0

    def sample(self, name: str) -> float:
        return self._registry.get_sample_value(name) or 0

    def states(self) -> list[str]:
        return sorted(one.state for one in self.pool.standings())

    async def until(self, *states: str) -> None:
        async with asyncio.timeout(10):
            while self.states() != sorted(states):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet_of(
    half: VisionHalf, *encoders: ScriptedEncoder, settings: PoolSettings = SETTINGS,
    targets: list[str] | None = None,
) -> AsyncIterator[Fleet]:  # fmt: skip
    async with AsyncExitStack() as stack:
        for encoder in encoders:
            await stack.enter_async_context(encoder.serving())
        registry = CollectorRegistry()
        found = discovery(
            targets or [one.address for one in encoders], dns_seconds=0.05, file_seconds=0.05
        )
        pool = EncoderPool(found, half.contract, settings, FleetMetrics(registry))
        stack.push_async_callback(pool.close)
        yield Fleet(half, pool, registry)


def liar_first(half: VisionHalf, behaviour: Behaviour) -> list[ScriptedEncoder]:
    return [ScriptedEncoder(half, behaviour), ScriptedEncoder(half)]


async def encode_all(fleet: Fleet, pictures: list[bytes]) -> None:
    """Every picture, each right, some of which had the liar as their first encoder."""
    for picture in pictures:
        fleet.check(picture, await fleet.encode(picture))


async def test_pictures_spread_over_encoders_and_repeats_go_to_the_same(
    half: VisionHalf, many: list[bytes]
) -> None:
    # Ports are what is hashed, and differ from run to run: with two, hardly one is left out.
    encoders = [ScriptedEncoder(half) for _ in range(2)]
    async with fleet_of(half, *encoders) as fleet:
        await fleet.until("ready", "ready")
        for _ in range(3):
            for picture in many:
                fleet.check(picture, await fleet.encode(picture))
    for encoder in encoders:
        assert len(encoder.asked) == 3 * len(set(encoder.asked)) > 0


async def test_the_pictures_of_one_request_are_encoded_at_once_on_several_encoders(
    half: VisionHalf, many: list[bytes]
) -> None:
    encoders = [ScriptedEncoder(half) for _ in range(3)]
    async with fleet_of(half, *encoders) as fleet:
        await fleet.until("ready", "ready", "ready")
        for encoder in encoders:
            encoder.seconds = 0.3
        await asyncio.gather(*(fleet.encode(picture) for picture in many))
    assert all(encoder.most_running >= 2 for encoder in encoders)


@pytest.mark.parametrize("lie", WRONG_ANSWERS)
async def test_a_wrong_answer_is_made_good_by_another_and_its_encoder_named_and_ejected(
    half: VisionHalf, many: list[bytes], lie: Behaviour
) -> None:
    liar, honest = liar_first(half, lie)
    async with fleet_of(half, liar, honest) as fleet:
        await fleet.until("ready", "ready")
        with structlog.testing.capture_logs() as logs:
            await encode_all(fleet, many)
        assert len(liar.asked) == 1
        assert fleet.states() == ["ejected", "ready"]
        assert fleet.count("ejections", cause="lying") == 1
    (told,) = (log for log in logs if log["event"] == "encoder ejected")
    assert (told["encoder"], told["cause"]) == (liar.address, "lying")


@pytest.mark.parametrize("lie", WRONG_STREAMS)
async def test_a_broken_stream_is_made_good_by_another_and_its_encoder_ejected(
    half: VisionHalf, many: list[bytes], lie: Behaviour
) -> None:
    liar, honest = liar_first(half, lie)
    async with fleet_of(half, liar, honest, settings=CHUNKED) as fleet:
        await fleet.until("ready", "ready")
        await encode_all(fleet, many)
        assert len(liar.asked) == 1
        assert fleet.count("ejections", cause="lying") == 1


@pytest.mark.parametrize("lie", WRONG_ANSWERS)
async def test_the_only_encoder_that_lies_gives_a_typed_error_and_is_asked_again_for_others(
    half: VisionHalf, many: list[bytes], lie: Behaviour
) -> None:
    liar = ScriptedEncoder(half, lie)
    async with fleet_of(half, liar) as fleet:
        with pytest.raises(ChiasmError) as failed:
            await fleet.encode(many[0])
        assert failed.value.reason is Reason.INTERNAL
        assert "breaks the contract" in failed.value.message
        liar.behaviour = "honest"
        fleet.check(many[1], await fleet.encode(many[1]))


@pytest.mark.parametrize("behaviour", ["silent", "dripping chunks"])
async def test_an_encoder_that_passes_probes_and_never_answers_costs_one_attempts_time(
    half: VisionHalf, many: list[bytes], behaviour: Behaviour
) -> None:
    quiet, honest = liar_first(half, behaviour)
    settings = replace(CHUNKED, encoder=replace(CHUNKED.encoder, attempt_seconds=0.5))
    async with fleet_of(half, quiet, honest, settings=settings) as fleet:
        await fleet.until("ready", "ready")
        began = time.monotonic()
        results = await asyncio.gather(*(fleet.encode(picture) for picture in many))
        assert time.monotonic() - began < 5
        for picture, fetched in zip(many, results, strict=True):
            fleet.check(picture, fetched)
        assert fleet.count("attempts", outcome="silence") == len(quiet.asked) > 0


async def test_an_encoder_that_answers_no_probe_loses_its_pictures_to_another(
    half: VisionHalf, many: list[bytes]
) -> None:
    frozen, honest = liar_first(half, "honest")
    long = replace(SETTINGS, encoder=replace(SETTINGS.encoder, attempt_seconds=60))
    async with fleet_of(half, frozen, honest, settings=long) as fleet:
        await fleet.until("ready", "ready")
        frozen.behaviour, frozen.probes_answered = "silent", False
        began = time.monotonic()
        results = await asyncio.gather(*(fleet.encode(picture, 30) for picture in many))
        assert time.monotonic() - began < 8
        for picture, fetched in zip(many, results, strict=True):
            fleet.check(picture, fetched)
        assert fleet.count("ejections", cause="silent") == 1
        assert frozen.left == len(frozen.asked) > 0
        frozen.behaviour, frozen.probes_answered = "honest", True
        await fleet.until("ready", "ready")


async def test_a_hung_encoder_whose_connection_broke_loses_its_pictures_to_another(
    half: VisionHalf, many: list[bytes]
) -> None:
    hung, honest = liar_first(half, "honest")
    long = replace(SETTINGS, encoder=replace(SETTINGS.encoder, attempt_seconds=60))
    async with fleet_of(half, hung, honest, settings=long) as fleet:
        await fleet.until("ready", "ready")
        hung.behaviour, hung.probes_refused = "silent", True
        results = await asyncio.gather(*(fleet.encode(picture, 20) for picture in many))
        for picture, fetched in zip(many, results, strict=True):
            fleet.check(picture, fetched)
        assert hung.left == len(hung.asked) > 0


async def test_an_encoder_that_drains_is_waited_for_where_there_is_no_other(
    half: VisionHalf, many: list[bytes]
) -> None:
    draining = ScriptedEncoder(half)
    long = replace(SETTINGS, encoder=replace(SETTINGS.encoder, attempt_seconds=60))
    async with fleet_of(half, draining, settings=long) as fleet:
        await fleet.until("ready")
        draining.seconds, draining.probes_refused = 3, True
        work = asyncio.create_task(fleet.encode(many[0], 20))
        await fleet.until("ejected")
        fleet.check(many[0], await work)


async def test_a_hung_encoder_taken_off_the_list_loses_its_pictures_to_another(
    half: VisionHalf, many: list[bytes], tmp_path: Path
) -> None:
    hung, honest = liar_first(half, "honest")
    listed = tmp_path / "encoders"
    long = replace(SETTINGS, encoder=replace(SETTINGS.encoder, attempt_seconds=60))
    async with (
        hung.serving(),
        honest.serving(),
        fleet_of(half, targets=[f"file://{listed}"], settings=long) as fleet,
    ):
        listed.write_text(f"{hung.address}\n{honest.address}")
        await fleet.until("ready", "ready")
        hung.behaviour, hung.probes_answered = "silent", False
        work = [asyncio.create_task(fleet.encode(picture, 20)) for picture in many]
        await _until(lambda: hung.running > 0)
        listed.write_text(honest.address)
        for picture, fetched in zip(many, await asyncio.gather(*work), strict=True):
            fleet.check(picture, fetched)
        assert hung.left == len(hung.asked) > 0


async def test_an_encoder_that_was_never_reached_is_named_in_the_log(half: VisionHalf) -> None:
    with structlog.testing.capture_logs() as logs:
        async with fleet_of(half, targets=["127.0.0.1:1"]) as fleet:
            await fleet.until("ejected")
            assert fleet.count("ejections", cause="unreachable") == 1
    (told,) = (log for log in logs if log["event"] == "encoder ejected")
    assert told["encoder"] == "127.0.0.1:1"


async def test_an_encoder_that_dies_is_left_at_once_and_taken_back_when_it_returns(
    half: VisionHalf, many: list[bytes]
) -> None:
    mortal, honest = liar_first(half, "honest")
    async with AsyncExitStack() as life:
        await life.enter_async_context(mortal.serving())
        async with honest.serving(), fleet_of(
            half, targets=[mortal.address, honest.address]
        ) as fleet:  # fmt: skip
            await fleet.until("ready", "ready")
            await life.aclose()
            began = time.monotonic()
            await encode_all(fleet, many)
            assert time.monotonic() - began < 3
            assert fleet.states() == ["ejected", "ready"]
            async with mortal.serving():
                await fleet.until("ready", "ready")
                before = len(mortal.asked)
                await encode_all(fleet, many)
                assert len(mortal.asked) > before


async def test_an_encoder_of_another_model_is_never_asked_until_it_serves_the_right_one(
    half: VisionHalf, many: list[bytes]
) -> None:
    foreign, honest = liar_first(half, "honest")
    foreign.model_id = "other"
    async with fleet_of(half, foreign, honest) as fleet:
        await fleet.until("foreign", "ready")
        await encode_all(fleet, many)
        assert not foreign.asked
        foreign.model_id = half.identity.model_id
        await fleet.until("ready", "ready")
        await encode_all(fleet, many)
        assert foreign.asked


async def test_an_encoder_that_changes_its_model_between_probes_is_caught_by_its_reply(
    half: VisionHalf, many: list[bytes]
) -> None:
    turned, honest = liar_first(half, "another identity")
    async with fleet_of(half, turned, honest) as fleet:
        await fleet.until("ready", "ready")
        await encode_all(fleet, many)
        assert fleet.count("attempts", outcome="foreign") >= 1
        assert fleet.count("ejections", cause="foreign") >= 1


async def test_a_fleet_of_another_model_is_told_as_that(
    half: VisionHalf, many: list[bytes]
) -> None:
    async with fleet_of(half, ScriptedEncoder(half, "another identity")) as fleet:
        with pytest.raises(ChiasmError) as failed:
            await fleet.encode(many[0])
    assert failed.value.reason is Reason.ENCODER_MISMATCH
    assert failed.value.metadata == {"origin": "encoder"}


async def test_a_full_fleet_is_told_as_full_and_not_asked_by_every_picture_twice_over(
    half: VisionHalf, many: list[bytes]
) -> None:
    encoders = [ScriptedEncoder(half, "busy") for _ in range(5)]
    async with fleet_of(half, *encoders) as fleet:
        await fleet.until(*["ready"] * 5)
        with pytest.raises(ChiasmError) as failed:
            await fleet.encode(many[0])
        assert (failed.value.reason, failed.value.retry_after) == (Reason.QUEUE_FULL, 3.0)
        assert sum(len(encoder.asked) for encoder in encoders) == 2
        assert fleet.states() == ["ready"] * 5


async def test_a_failure_inside_an_encoder_is_told_and_not_tried_elsewhere(
    half: VisionHalf, many: list[bytes]
) -> None:
    encoders = [ScriptedEncoder(half, "fails") for _ in range(2)]
    async with fleet_of(half, *encoders) as fleet:
        await fleet.until("ready", "ready")
        with pytest.raises(ChiasmError) as failed:
            await fleet.encode(many[0])
        assert failed.value.reason is Reason.INTERNAL
        assert sum(len(encoder.asked) for encoder in encoders) == 1


async def test_an_encoder_that_goes_on_failing_is_ejected(
    half: VisionHalf, many: list[bytes]
) -> None:
    failing, honest = liar_first(half, "fails")
    async with fleet_of(half, failing, honest) as fleet:
        await fleet.until("ready", "ready")
        failures = 0
        for picture in many * 4:
            try:
                await fleet.encode(picture)
            except ChiasmError:
                failures += 1
        assert failures == 3
        assert fleet.count("ejections", cause="failing") == 1


async def test_an_outage_is_not_amplified(half: VisionHalf, many: list[bytes]) -> None:
    encoders = [ScriptedEncoder(half, "refuses") for _ in range(4)]
    async with fleet_of(half, *encoders, settings=replace(SETTINGS, wait_seconds=0)) as fleet:
        await fleet.until(*["ready"] * 4)
        for _ in range(60):
            results = await asyncio.gather(
                *(fleet.encode(picture) for picture in many), return_exceptions=True
            )
            assert all(isinstance(one, ChiasmError) for one in results)
        asked = sum(len(encoder.asked) for encoder in encoders)
        pictures = 60 * len(many)
        assert fleet.count("retries") <= 100 + 0.2 * pictures
        assert asked <= pictures + fleet.count("retries")
        assert {one.reason for one in results} == {Reason.NO_ENCODER}  # type: ignore[union-attr]


async def test_the_deadline_ends_the_attempts(half: VisionHalf, many: list[bytes]) -> None:
    encoders = [ScriptedEncoder(half, "silent") for _ in range(3)]
    async with fleet_of(half, *encoders) as fleet:
        await fleet.until(*["ready"] * 3)
        began = time.monotonic()
        with pytest.raises(ChiasmError) as failed:
            await fleet.encode(many[0], seconds=0.4)
        assert time.monotonic() - began < 1.5
        assert failed.value.reason is Reason.DEADLINE
        assert fleet.states() == ["ready"] * 3


async def test_a_caller_that_leaves_leaves_no_work_at_any_encoder(
    half: VisionHalf, many: list[bytes]
) -> None:
    encoders = [ScriptedEncoder(half, "silent") for _ in range(2)]
    async with fleet_of(half, *encoders) as fleet:
        await fleet.until("ready", "ready")
        work = [asyncio.create_task(fleet.encode(picture)) for picture in many]
        await _until(lambda: sum(one.running for one in encoders) == len(many))
        for task in work:
            task.cancel()
        await _until(lambda: sum(one.running for one in encoders) == 0, seconds=1)
        assert sum(one.left for one in encoders) == len(many)
        assert fleet.states() == ["ready", "ready"]


async def test_no_encoder_at_start_is_tolerated_and_one_that_appears_gets_work_at_once(
    half: VisionHalf, many: list[bytes], tmp_path: Path
) -> None:
    listed = tmp_path / "encoders"
    first, second = ScriptedEncoder(half), ScriptedEncoder(half)
    async with (
        first.serving(),
        second.serving(),
        fleet_of(half, targets=[f"file://{listed}"], settings=replace(SETTINGS, wait_seconds=0.1))
        as fleet,
    ):  # fmt: skip
        with pytest.raises(ChiasmError) as failed:
            await fleet.encode(many[0])
        assert failed.value.reason is Reason.NO_ENCODER
        listed.write_text(first.address)
        await fleet.until("ready")
        await encode_all(fleet, many)
        listed.write_text(f"{first.address}\n{second.address}")
        await fleet.until("ready", "ready")
        await encode_all(fleet, many)
        assert second.asked
        listed.write_text(second.address)
        await fleet.until("ready")
        before = len(first.asked)
        await encode_all(fleet, many)
        assert len(first.asked) == before


async def test_an_encoder_taken_off_the_list_still_answers_what_it_was_asked(
    half: VisionHalf, many: list[bytes], tmp_path: Path
) -> None:
    listed = tmp_path / "encoders"
    encoder = ScriptedEncoder(half)
    async with encoder.serving(), fleet_of(half, targets=[f"file://{listed}"]) as fleet:
        listed.write_text(encoder.address)
        await fleet.until("ready")
        encoder.seconds = 0.5
        work = asyncio.create_task(fleet.encode(many[0]))
        await _until(lambda: encoder.running == 1)
        listed.write_text("")
        await fleet.until()
        fleet.check(many[0], await work)


async def test_a_slow_encoder_is_ejected_and_others_go_on(
    half: VisionHalf, many: list[bytes]
) -> None:
    encoders = [ScriptedEncoder(half) for _ in range(3)]
    async with fleet_of(half, *encoders) as fleet:
        await fleet.until(*["ready"] * 3)
        encoders[0].seconds = 0.4
        for _ in range(30):
            await asyncio.gather(*(fleet.encode(picture) for picture in many))
            if "ejected" in fleet.states():
                break
        assert fleet.states() == ["ejected", "ready", "ready"]
        assert fleet.count("ejections", cause="slow") == 1


async def test_a_late_answer_is_asked_for_again_where_hedging_is_on(
    half: VisionHalf, many: list[bytes]
) -> None:
    slow, quick = liar_first(half, "honest")
    async with fleet_of(half, slow, quick, settings=replace(SETTINGS, hedge=True)) as fleet:
        await fleet.until("ready", "ready")
        for _ in range(8):
            await encode_all(fleet, many)
        slow.seconds = 1.5
        began = time.monotonic()
        await asyncio.gather(*(fleet.encode(picture) for picture in many))
        assert time.monotonic() - began < 1.4
        assert fleet.count("hedges") > 0
        await _until(lambda: slow.running == 0, seconds=1)


async def _until(done: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.01)


def test_every_scripted_lie_is_told_by_some_test() -> None:
    tested = {*WRONG_ANSWERS, *WRONG_STREAMS, "honest", "silent", "dripping chunks", "refuses"}
    assert set(get_args(Behaviour)) == tested | {"another identity", "busy", "fails"}


@pytest.mark.parametrize("claimed", [float("nan"), float("inf"), -1e9, 1e9])
async def test_what_an_encoder_says_of_its_time_is_believed_only_if_it_can_be(
    half: VisionHalf, many: list[bytes], claimed: float
) -> None:
    encoder = ScriptedEncoder(half)
    encoder.claimed_seconds = claimed
    async with fleet_of(half, encoder) as fleet:
        await fleet.until("ready")
        fetched = await fleet.encode(many[0])
        sampled = fleet.sample("chiasm_llm_encoder_transfer_seconds_sum")
    assert fetched.encode_seconds == 0
    assert 0 < sampled < 10


async def test_bytes_and_transfer_are_counted_once_for_each_answer_that_is_right(
    half: VisionHalf, many: list[bytes]
) -> None:
    encoder = ScriptedEncoder(half)
    encoder.seconds, encoder.claimed_seconds = 0.2, 0.1
    async with fleet_of(half, *liar_first(half, "not finite"), encoder) as fleet:
        await fleet.until("ready", "ready", "ready")
        rows = [(await fleet.encode(picture)).rows for picture in many[:6]]
        assert fleet.count("received_bytes") == sum(one.byte_count for one in rows)
        assert fleet.sample("chiasm_llm_encoder_transfer_seconds_count") == 6
