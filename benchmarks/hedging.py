"""`python -m benchmarks.hedging`: what `--encoder-hedge` gives, and what it costs.

Four encoder servers on loopback that answer with a real tower's features after a scripted time, and
the pool of an LLM service that asks them, with and without hedging in turn, round by round.
Pictures come at a steady rate (Poisson), none twice. The scripted times: `even` (each answer takes
40 ms), `pauses` (one answer in fifty takes fifteen times as long, as beside a noisy neighbour),
`slow one` (one encoder of four takes three times as long, below what ejects it). Times are from
asking to checked rows, in ms; `work` is the encodings begun for each picture.
"""

import argparse
import asyncio
import hashlib
import io
import random
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import PIL.Image
import torch
from prometheus_client import CollectorRegistry

from chiasm import telemetry
from chiasm.models.contract import DEFAULT_OPTIONS
from chiasm.models.vision import VisionHalf
from llm_service.request import RawImage
from llm_service.vision.discovery import discovery
from llm_service.vision.encoder import EncoderSettings
from llm_service.vision.fleet_metrics import FleetMetrics
from llm_service.vision.pool import EncoderPool, PoolSettings
from llm_service.vision.source import Asked, Sought
from tests.scripted_encoder import ScriptedEncoder

MODEL: Final = Path(__file__).parents[1] / "demo_model" / "checkpoint"
BASE_SECONDS: Final = 0.04
PAUSE_SHARE: Final = 0.02
PAUSE_TIMES: Final = 15
SLOW_TIMES: Final = 3
# By when the pool has probed its encoders.
_FOUND_SECONDS: Final = 1.0
SCRIPTS: Final = ("even", "pauses", "slow one")


class Timed(ScriptedEncoder):
    """Answers after the script's time."""

    def __init__(self, half: VisionHalf, script: str, index: int) -> None:
        super().__init__(half)
        self._script = script
        self._index = index
        self._random = random.Random(index)

    async def _wait_or_fail(self) -> None:
        slow = self._script == "slow one" and self._index == 0
        paused = self._script == "pauses" and self._random.random() < PAUSE_SHARE
        await asyncio.sleep(BASE_SECONDS * (SLOW_TIMES if slow else PAUSE_TIMES if paused else 1))


@dataclass(frozen=True)
class Round:
    """Seconds of each picture; encodings begun for each."""

    seconds: list[float]
    work: float

    def quantile(self, share: float) -> float:
        return (
            1e3 * sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]
        )


def picture(seed: int) -> bytes:
    """A PNG of its own, encoded once by the demo model's tower in about 4 ms."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    held = io.BytesIO()
    PIL.Image.fromarray(pixels).save(held, "PNG")
    return held.getvalue()


async def measure(half: VisionHalf, script: str, hedge: bool, count: int, rate: float) -> Round:
    encoders = [Timed(half, script, index) for index in range(4)]
    settings = PoolSettings(EncoderSettings(1.0, 10.0), attempts=3, wait_seconds=2.0, hedge=hedge)
    async with AsyncExitStack() as stack:
        for encoder in encoders:
            await stack.enter_async_context(encoder.serving())
        found = discovery([one.address for one in encoders], dns_seconds=1, file_seconds=1)
        pool = EncoderPool(found, half.contract, settings, FleetMetrics(CollectorRegistry()))
        stack.push_async_callback(pool.close)
        await asyncio.sleep(_FOUND_SECONDS)
        assert all(one.ready for one in pool.standings())
        await _arrive(half, pool, 64, rate, first=count)  # So that there is a p95 to hedge past.
        asked = sum(len(one.asked) for one in encoders)
        seconds = await _arrive(half, pool, count, rate, first=0)
        return Round(seconds, (sum(len(one.asked) for one in encoders) - asked) / count)


async def _arrive(
    half: VisionHalf, pool: EncoderPool, count: int, rate: float, first: int
) -> list[float]:
    times = random.Random(7)
    running = []
    for seed in range(first, first + count):
        running.append(asyncio.create_task(_ask(half, pool, picture(seed))))
        await asyncio.sleep(times.expovariate(rate))
    return list(await asyncio.gather(*running))


async def _ask(half: VisionHalf, pool: EncoderPool, data: bytes) -> float:
    form = half.contract.of_size((8, 8), DEFAULT_OPTIONS)
    asked = Asked("", "hedging", time.monotonic() + 60)
    image = RawImage(memoryview(data), DEFAULT_OPTIONS)
    began = time.monotonic()
    await pool.encode(Sought(image, hashlib.sha256(data).digest(), form, asked))
    return time.monotonic() - began


async def table(count: int, rate: float, rounds: int) -> None:
    torch.set_num_threads(1)
    half = VisionHalf.load(MODEL, model_id="demo")
    print("| times | hedged | p50 | p95 | p99 | longest | work |\n|---|---|---|---|---|---|---|")
    for script in SCRIPTS:
        done: dict[bool, list[Round]] = {False: [], True: []}
        for _ in range(rounds):
            for hedge, held in done.items():
                held.append(await measure(half, script, hedge, count, rate))
        for hedge, held in done.items():
            shown = [statistics.median(r.quantile(q) for r in held) for q in (0.5, 0.95, 0.99, 1)]
            work = statistics.median(r.work for r in held)
            cells = " | ".join(f"{one:.0f}" for one in shown)
            print(f"| {script} | {'yes' if hedge else 'no'} | {cells} | {work:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=600, help="a round (default 600)")
    parser.add_argument("--rate", type=float, default=40.0, help="pictures a second (default 40)")
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default 3)")
    arguments = parser.parse_args()
    telemetry.start_logging("hedging", "console", "error")
    asyncio.run(table(arguments.pictures, arguments.rate, arguments.rounds))


if __name__ == "__main__":
    main()
