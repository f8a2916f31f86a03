"""`python -m benchmarks.placement`: which encoder should a picture go to? A simulation.

Encoders of equal speed with caches of their own, several LLM services that each know only what they
themselves asked for, pictures whose popularity is skewed (Zipf) and whose sizes differ by 16, and
requests of one to eight pictures that wait for their last one. An encoder computes one picture at a
time; a picture in its cache costs it a fiftieth. For each policy: the time that a picture waits
beyond its own encoding (50th and 99th percentile, in mean encoding times), that of a whole request,
the share of pictures found in a cache, and the work of the busiest encoder against the mean.
The figures of one fleet come from the same arrivals for each policy.
"""

import argparse
import heapq
import random
import sys
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import numpy as np

from llm_service.vision.placement import Seat, order, ranks

CACHE_HIT_COST = 0.02
PICTURES_PER_ENCODER = 200
CACHED_PER_ENCODER = 50
SKEW = 0.9
LLM_SERVICES = 4
ROWS = (64, 128, 256, 512, 1024)
Choose = Callable[[Sequence[Seat], bytes], int]


@dataclass(frozen=True)
class Picture:
    """One picture of the catalogue; `cost` is in mean encoding times."""

    digest: bytes
    rows: int
    cost: float


@dataclass
class Server:
    """An encoder: when it is free, what it holds, and what it has done."""

    free_at: float = 0.0
    busy: float = 0.0
    cache: "OrderedDict[bytes, None]" = field(default_factory=OrderedDict)

    def encode(self, picture: Picture, now: float) -> tuple[float, bool]:
        """When the picture is done, and whether it was in the cache."""
        hit = picture.digest in self.cache
        cost = picture.cost * (CACHE_HIT_COST if hit else 1)
        self.cache[picture.digest] = None
        self.cache.move_to_end(picture.digest)
        if len(self.cache) > CACHED_PER_ENCODER:
            self.cache.popitem(last=False)
        self.free_at = max(self.free_at, now) + cost
        self.busy += cost
        return self.free_at, hit


@dataclass(frozen=True)
class Figures:
    """What one policy gave on one fleet; times in mean encoding times."""

    waits: tuple[float, float]
    request_p99: float
    hit_rate: float
    imbalance: float


def policies(names: Sequence[str], seed: int) -> dict[str, Choose]:
    """Each policy by the name that the table gives it. Some have state: make them for each run."""
    turn, chance, ring = count(), random.Random(seed), _Ring(names)

    def fewest(seats: Sequence[Seat], at: Sequence[int]) -> int:
        return min(at, key=lambda index: seats[index].outstanding)

    return {
        "round robin": lambda seats, _: next(turn) % len(seats),
        "fewest outstanding": lambda seats, _: fewest(
            seats, sorted(range(len(seats)), key=lambda _: chance.random())
        ),
        "two at random": lambda seats, _: fewest(seats, _two(seats, chance)),
        "consistent hashing": lambda seats, digest: ring.find(digest),
        "first rank": lambda seats, digest: ranks([seat.name for seat in seats], digest)[0],
        "the fewer outstanding of two ranks": lambda seats, digest: order(seats, digest)[0],
    }


def _two(seats: Sequence[Seat], chance: random.Random) -> list[int]:
    return chance.sample(range(len(seats)), min(2, len(seats)))


class _Ring:
    """Consistent hashing with 100 places an encoder (Karger and others, 1997)."""

    def __init__(self, names: Sequence[str]) -> None:
        self._places = sorted(
            (blake2b(f"{name}/{place}".encode(), digest_size=8).digest(), at)
            for at, name in enumerate(names)
            for place in range(100)
        )

    def find(self, digest: bytes) -> int:
        at = bisect(self._places, (digest[:8], -1))
        return self._places[at % len(self._places)][1]


def catalogue(size: int, chance: np.random.Generator) -> list[Picture]:
    """Pictures of skewed sizes, whose mean cost is 1."""
    rows = chance.choice(ROWS, size, p=(0.35, 0.3, 0.2, 0.1, 0.05))
    mean = float(rows.mean())
    return [Picture(chance.bytes(32), int(one), float(one) / mean) for one in rows]


def arrivals(
    fleet: int, load: float, pictures: int, hit_rate: float, chance: np.random.Generator
) -> Iterator[tuple[float, list[int]]]:
    """Times and pictures of requests. `load` is against what encoders with `hit_rate` can do."""
    size = fleet * PICTURES_PER_ENCODER
    weights = np.arange(1, size + 1, dtype=float) ** -SKEW
    popularity = np.cumsum(weights / weights.sum())
    cost = 1 - hit_rate * (1 - CACHE_HIT_COST)
    now = 0.0
    while pictures > 0:
        group = int(min(8, chance.geometric(0.6)))
        now += float(chance.exponential(group * cost / (fleet * load)))
        yield now, np.searchsorted(popularity, chance.random(group)).tolist()
        pictures -= group


class Views:
    """What each LLM service has asked of each encoder and not been answered."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._rows = [[0] * len(names) for _ in range(LLM_SERVICES)]
        self._ends: list[tuple[float, int, int, int]] = []

    def seats(self, service: int, now: float) -> list[Seat]:
        while self._ends and self._ends[0][0] <= now:
            _, owner, at, rows = heapq.heappop(self._ends)
            self._rows[owner][at] -= rows
        return [Seat(*one) for one in zip(self._names, self._rows[service], strict=True)]

    def asked(self, service: int, at: int, rows: int, until: float) -> None:
        self._rows[service][at] += rows
        heapq.heappush(self._ends, (until, service, at, rows))


def run(policy: str, fleet: int, load: float, pictures: int, seed: int) -> Figures:
    """One policy on one fleet. The first half of the pictures fills caches and is not counted."""
    chance = np.random.default_rng(seed)
    known = catalogue(fleet * PICTURES_PER_ENCODER, chance)
    names = [f"10.0.{at // 250}.{at % 250}:50061" for at in range(fleet)]
    choose, views = policies(names, seed)[policy], Views(names)
    servers = [Server() for _ in names]
    waits: deque[float] = deque()
    whole: deque[float] = deque()
    hits = seen = 0
    for number, (now, group) in enumerate(arrivals(fleet, load, pictures, 0.5, chance)):
        last = 0.0
        for one in group:
            picture, service = known[one], number % LLM_SERVICES
            at = choose(views.seats(service, now), picture.digest)
            done, hit = servers[at].encode(picture, now)
            views.asked(service, at, picture.rows, done)
            wait = done - now - picture.cost * (CACHE_HIT_COST if hit else 1)
            seen += 1
            if seen > pictures / 2:
                waits.append(wait)
                hits += hit
            last = max(last, done - now)
        if seen > pictures / 2:
            whole.append(last)
    busy = [server.busy for server in servers]
    p50, p99 = np.percentile(waits, (50, 99))
    return Figures(
        (float(p50), float(p99)),
        float(np.percentile(whole, 99)),
        hits / len(waits),
        max(busy) / (sum(busy) / len(busy)),
    )


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fleets", type=int, nargs="+", default=[4, 16, 100, 1000])
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5, 0.8], help="at a hit rate of one half"
    )
    parser.add_argument("--pictures", type=int, default=20_000, help="of each run")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Prints the table in Markdown, a row as soon as it is known."""
    asked = arguments()
    print("| encoders | load | policy | wait p50 | wait p99 | request p99 | hits | busiest |")
    print("|---|---|---|---|---|---|---|---|")
    runs = [
        (fleet, load, name)
        for fleet in asked.fleets
        for load in asked.loads
        for name in policies(["one"], 0)
    ]
    for number, (fleet, load, name) in enumerate(runs, 1):
        print(f"\r{number} of {len(runs)}: {fleet} encoders, {name}", end="\033[K", file=sys.stderr)
        found = run(name, fleet, load, max(asked.pictures, 8 * fleet), asked.seed)
        print("\r\033[K", end="", file=sys.stderr)
        print(
            f"| {fleet} | {load} | {name} | {found.waits[0]:.2f} | {found.waits[1]:.2f} "
            f"| {found.request_p99:.1f} | {found.hit_rate:.0%} | {found.imbalance:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
