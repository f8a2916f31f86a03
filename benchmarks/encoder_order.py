"""How long pictures wait by the order of work: a simulation with the encoder service's own line.

One tower that encodes one picture at a time, without interruption. Small pictures (25 ms each) come
at random times; large ones (40 times the work) come at random times too, or in a burst of 20 at
once every 100 seconds. The estimate of a picture's cost is off by up to a third either way. The
tower is busy for 0.8 of the time, 0.4 for each kind. `wait` is until a picture's encoding begins.
For all orders of a load the same arrivals.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from encoder_service.order import Line, key_of

SMALL, LARGE = 0.025, 1.0
SHARE = 0.4
BURST, BURST_PERIOD = 20, 100.0
# math.inf: the cheapest first, whatever has waited.
STRETCHES = (0, 2, 4, 8, 16, 32, math.inf)


@dataclass(frozen=True)
class Work:
    """One picture; all in seconds."""

    arrival: float
    cost: float
    estimate: float


def order(seeds: int, seconds: float) -> None:
    """Prints a Markdown table: the median over the seeds of each percentile."""
    print("| large ones come | order | small: wait p50, s | p99, s | large: wait p50, s | p99, s "
          "| longest, s |\n|---|---|---:|---:|---:|---:|---:|")  # fmt: skip
    for burst in (False, True):
        runs = [arrivals(burst, seconds, seed) for seed in range(seeds)]
        for stretch in STRETCHES:
            figures = np.median([_figures(run, stretch) for run in runs], axis=0)
            when = f"{BURST} at once" if burst else "at random"
            shown = " | ".join(f"{one:.2f}" for one in figures)
            print(f"| {when} | {_name(stretch)} | {shown} |", flush=True)


def arrivals(burst: bool, seconds: float, seed: int) -> list[Work]:
    """Pictures in the order of their coming."""
    chance = np.random.default_rng(seed)
    small = _at_random(chance, SHARE / SMALL, seconds)
    large = _bursts(seconds) if burst else _at_random(chance, SHARE / LARGE, seconds)
    found = [(at, SMALL) for at in small] + [(at, LARGE) for at in large]
    errors = chance.uniform(2 / 3, 4 / 3, len(found))
    return [
        Work(at, cost, cost * error)
        for (at, cost), error in zip(sorted(found), errors, strict=True)
    ]


def _at_random(chance: np.random.Generator, rate: float, seconds: float) -> list[float]:
    count = chance.poisson(rate * seconds)
    return sorted(chance.uniform(0, seconds, count))


def _bursts(seconds: float) -> list[float]:
    return [at for at in np.arange(0, seconds, BURST_PERIOD).tolist() for _ in range(BURST)]


def waits(pictures: Sequence[Work], stretch: float) -> Iterator[tuple[Work, float]]:
    """Each picture with its wait, in the order of encoding."""
    line: Line[Work] = Line()
    now, at = 0.0, 0
    while at < len(pictures) or len(line):
        if not len(line):
            now = max(now, pictures[at].arrival)
        while at < len(pictures) and pictures[at].arrival <= now:
            line.put(pictures[at], _key(pictures[at], stretch))
            at += 1
        one = line.take()
        yield one, now - one.arrival
        now += one.cost


def _key(work: Work, stretch: float) -> float:
    if math.isinf(stretch):
        return work.estimate
    return key_of(work.arrival, work.estimate, stretch)


def _figures(pictures: Sequence[Work], stretch: float) -> list[float]:
    found = list(waits(pictures, stretch))
    small = [wait for work, wait in found if work.cost == SMALL]
    large = [wait for work, wait in found if work.cost == LARGE]
    return [*np.percentile(small, (50, 99)), *np.percentile(large, (50, 99)), max(large)]


def _name(stretch: float) -> str:
    if stretch == 0:
        return "first come, first served"
    return "cheapest first" if math.isinf(stretch) else f"stretch {stretch:g}"
