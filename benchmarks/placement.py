"""`python -m benchmarks.placement`: which encoder should a picture go to? A simulation.

Encoders of equal speed, each with a cache of its own (least recently used, bounded in bytes), that
compute one picture at a time, in a time proportional to its rows; what is in the cache costs a
fiftieth. LLM services that each know only what they themselves have outstanding. Pictures whose
popularity is skewed (Zipf) and whose sizes differ by 16. Requests of one to eight pictures arrive
at random (Poisson) and wait for their last one.

Load 1 is what the fleet could do if no picture ever came twice. For each policy: the time that a
picture waits before its own encoding begins, and from a request's arrival to its last picture, in
mean encoding times; the share of pictures found in a cache; the work of the busiest encoder
against the mean; and the hit rate just before and after an encoder is added, and after another one
is lost. Of one fleet and load, every policy gets the same arrivals; the first half of the pictures
fills the caches and is not counted. What says no load is at 0.9. Above what a policy can do its
queues grow as long as the run goes on.
"""

import argparse
import heapq
import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from llm_service.vision.placement import choice, ranks

CACHE_HIT_COST = 0.02
PICTURES_PER_ENCODER, CACHED_PER_ENCODER = 80, 20
PICTURES_SEEN_PER_ENCODER = 120
RING_PLACES = 100
BOUND = 1.25
# How many of a picture's ranks a policy may see.
RANKS_KEPT = 32
MOST_PICTURES = 8
# The load of the columns after those of the waits.
DETAIL_LOAD = 0.9
LEAST_WINDOW = 500
ROWS, ROW_SHARES = (64, 128, 256, 512, 1024), (0.35, 0.3, 0.2, 0.1, 0.05)
MEAN_ROWS = sum(rows * share for rows, share in zip(ROWS, ROW_SHARES, strict=True))


@dataclass(frozen=True)
class World:
    """What is the same for every run."""

    services: int
    skew: float
    pictures: int
    seed: int


@dataclass(frozen=True)
class Picture:
    """One picture of the catalogue."""

    digest: bytes
    rows: int

    @property
    def cost(self) -> float:
        return self.rows / MEAN_ROWS


class Ring:
    """Consistent hashing (Karger and others, 1997)."""

    def __init__(self, names: Sequence[str]) -> None:
        places = sorted(
            (blake2b(f"{name}/{place}".encode(), digest_size=8).digest(), at)
            for at, name in enumerate(names)
            for place in range(RING_PLACES)
        )
        self._hashes = [one for one, _ in places]
        self._owners = [at for _, at in places]

    def find(self, digest: bytes) -> int:
        return self._owners[bisect(self._hashes, digest[:8]) % len(self._owners)]


class Fleet:
    """Names of the encoders, and what hashing makes of them, computed once a picture."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.at = {name: at for at, name in enumerate(names)}
        self.ring = Ring(names)
        self._ranks: dict[bytes, list[int]] = {}

    def ranks(self, digest: bytes) -> list[int]:
        found = self._ranks.get(digest)
        if found is None:
            found = self._ranks[digest] = ranks(self.names, digest)[:RANKS_KEPT]
        return found


@dataclass
class View:
    """What one LLM service knows: `rows` that it has outstanding at each encoder."""

    fleet: Fleet
    rows: NDArray[np.int64]
    chance: random.Random
    turn: int = 0


Choose = Callable[[View, Picture], int]


def round_robin(view: View, _: Picture) -> int:
    view.turn += 1
    return view.turn % len(view.rows)


def at_random(view: View, _: Picture) -> int:
    return view.chance.randrange(len(view.rows))


def fewest(view: View, _: Picture) -> int:
    return int(view.chance.choice(np.flatnonzero(view.rows == view.rows.min())))


def two_at_random(view: View, picture: Picture) -> int:
    """The policy that Mitzenmacher examined; the ranks break a tie."""
    two = view.chance.sample(range(len(view.rows)), min(2, len(view.rows)))
    names = [view.fleet.names[at] for at in two]
    return min((two[at] for at in ranks(names, picture.digest)), key=view.rows.__getitem__)


def digest_modulo(view: View, picture: Picture) -> int:
    return int.from_bytes(picture.digest[:8], "little") % len(view.rows)


def ring(view: View, picture: Picture) -> int:
    return view.fleet.ring.find(picture.digest)


def first_rank(view: View, picture: Picture) -> int:
    return view.fleet.ranks(picture.digest)[0]


def bounded(view: View, picture: Picture) -> int:
    """Bounded loads (Mirrokni and others, 2016), by rank; an idle encoder may always be asked."""
    most = BOUND * (int(view.rows.sum()) + picture.rows) / len(view.rows)
    known = view.fleet.ranks(picture.digest)
    for at in known:
        if not view.rows[at] or view.rows[at] + picture.rows <= most:
            return at
    return min(known, key=view.rows.__getitem__)


def affine(view: View, picture: Picture, margin: float, candidates: int = 2) -> int:
    """The first rank, unless it has more outstanding, by `margin` rows, than another candidate."""
    known = view.fleet.ranks(picture.digest)[:candidates]
    best = min(known, key=view.rows.__getitem__)
    return best if view.rows[known[0]] > view.rows[best] + margin else known[0]


def shipped(view: View, picture: Picture) -> int:
    """The product's policy, without its ranking the fleet anew for a picture that it has seen."""
    known = view.fleet.ranks(picture.digest)
    return known[choice(known, view.rows.tolist())]


POLICIES: dict[str, Choose] = {
    "round robin": round_robin,
    "random": at_random,
    "fewest outstanding": fewest,
    "two at random": two_at_random,
    "digest modulo encoders": digest_modulo,
    "consistent hashing": ring,
    "first rank": first_rank,
    "bounded loads": bounded,
    "second rank beyond 1 picture": partial(affine, margin=MEAN_ROWS),
    "second rank beyond 4 pictures": partial(affine, margin=4 * MEAN_ROWS),
    "fewer of three ranks": partial(affine, margin=0, candidates=3),
    "fewer of two ranks": partial(affine, margin=0),
    "**fewer of two ranks, next if crowded** (Chiasm)": shipped,
}


@dataclass
class Server:
    """An encoder: when it is free, what it has done, and the rows of the pictures that it holds."""

    free_at: float = 0.0
    busy: float = 0.0
    held: int = 0
    cache: "OrderedDict[bytes, int]" = field(default_factory=OrderedDict)

    def encode(self, picture: Picture, now: float) -> tuple[float, float, bool]:
        """When the picture begins, when it is done, and whether it was in the cache."""
        hit = picture.digest in self.cache
        cost = picture.cost * (CACHE_HIT_COST if hit else 1)
        self._keep(picture)
        begun = max(self.free_at, now)
        self.free_at = begun + cost
        self.busy += cost
        return begun, self.free_at, hit

    def _keep(self, picture: Picture) -> None:
        # Before its encoding ends; whoever asks meanwhile queues behind it.
        if picture.digest not in self.cache:
            self.cache[picture.digest] = picture.rows
            self.held += picture.rows
        self.cache.move_to_end(picture.digest)
        while self.held > CACHED_PER_ENCODER * MEAN_ROWS:
            self.held -= self.cache.popitem(last=False)[1]


class Simulation:
    """A fleet that serves requests under one policy."""

    def __init__(self, fleet: Fleet, choose: Choose, world: World) -> None:
        self._choose = choose
        self._servers = [Server() for _ in fleet.names]
        self._views = [
            View(fleet, np.zeros(len(fleet.names), np.int64), random.Random(world.seed + owner))
            for owner in range(world.services)
        ]
        self._ends: list[tuple[float, int, str, int]] = []
        self.waits: list[float] = []
        self.hits: list[bool] = []
        self.requests: list[float] = []

    @property
    def work(self) -> list[float]:
        return [server.busy for server in self._servers]

    def serve(self, now: float, owner: int, pictures: Sequence[Picture]) -> None:
        self._settle(now)
        self.requests.append(max(self._ask(now, owner, one) for one in pictures) - now)

    def become(self, fleet: Fleet) -> None:
        """Encoders come empty or go with what they hold; what they were asked for is answered."""
        was = self._views[0].fleet.names
        kept = dict(zip(was, self._servers, strict=True))
        self._servers = [kept.get(name) or Server() for name in fleet.names]
        for view in self._views:
            rows = dict(zip(was, view.rows.tolist(), strict=True))
            view.rows = np.array([rows.get(name, 0) for name in fleet.names], np.int64)
            view.fleet = fleet
        self._ends = [one for one in self._ends if one[2] in set(fleet.names)]
        heapq.heapify(self._ends)

    def _ask(self, now: float, owner: int, picture: Picture) -> float:
        view = self._views[owner]
        at = self._choose(view, picture)
        begun, done, hit = self._servers[at].encode(picture, now)
        view.rows[at] += picture.rows
        heapq.heappush(self._ends, (done, owner, view.fleet.names[at], picture.rows))
        self.waits.append(begun - now)
        self.hits.append(hit)
        return done

    def _settle(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, owner, name, rows = heapq.heappop(self._ends)
            view = self._views[owner]
            view.rows[view.fleet.at[name]] -= rows


@dataclass(frozen=True)
class Mark:
    """From where on a simulation counts: how many pictures and requests, and the work, before."""

    pictures: int
    requests: int
    work: list[float]


@dataclass(frozen=True)
class Figures:
    """What one policy gave on one fleet; times in mean encoding times."""

    waits: tuple[float, float]
    request_p99: float
    hit_rate: float
    busiest: float


@dataclass(frozen=True)
class Churn:
    """Hit rates before and after one encoder came, and after another one went."""

    before: float
    added: float
    lost: float


class Trace:
    """A fleet with its pictures, and the requests that reach it, the same for every policy."""

    def __init__(self, size: int, world: World) -> None:
        self._world = world
        self._size = size
        self._seen = max(world.pictures, PICTURES_SEEN_PER_ENCODER * size)
        names = [f"10.0.{at // 250}.{at % 250}:50061" for at in range(size + 1)]
        # Without the newcomer, with it, and without one that was there.
        self._fleets = (Fleet(names[:-1]), Fleet(names), Fleet(names[1:]))
        chance = np.random.default_rng(world.seed)
        rows = chance.choice(ROWS, PICTURES_PER_ENCODER * size, p=ROW_SHARES).tolist()
        self._pictures = [Picture(chance.bytes(32), one) for one in rows]

    def figures(self, choose: Choose, load: float) -> Figures:
        """One policy's figures on a fleet that stays as it is."""
        simulation = Simulation(self._fleets[0], choose, self._world)
        mark = Mark(0, 0, [])
        for arrival in self._arrivals(load, self._seen):
            simulation.serve(*arrival)
            if not mark.work and len(simulation.waits) > self._seen // 2:
                mark = Mark(len(simulation.waits), len(simulation.requests), simulation.work)
        return _figures(simulation, mark)

    def churn(self, choose: Choose) -> Churn:
        """One policy's hit rates as its fleet changes, each over some 5 pictures an encoder."""
        simulation, rates = Simulation(self._fleets[0], choose, self._world), []
        window = max(5 * self._size, LEAST_WINDOW)
        changes = [(self._seen, self._fleets[1]), (self._seen + 2 * window, self._fleets[2])]
        ends = [self._seen, self._seen + window, self._seen + 3 * window]
        for arrival in self._arrivals(DETAIL_LOAD, ends[-1] + window):
            simulation.serve(*arrival)
            served = len(simulation.hits)
            if ends and served >= ends[0]:
                ends.pop(0)
                rates.append(float(np.mean(simulation.hits[-window:])))
            if changes and served >= changes[0][0]:
                simulation.become(changes.pop(0)[1])
        return Churn(*rates)

    def _arrivals(self, load: float, pictures: int) -> Iterator[tuple[float, int, list[Picture]]]:
        """When a request arrives, at which LLM service, with what."""
        world, known = self._world, self._pictures
        chance = np.random.default_rng(world.seed + 1)
        weights = np.arange(1, len(known) + 1, dtype=float) ** -world.skew
        popularity = np.cumsum(weights)
        # Popular pictures may be larger than others: a load is of work, not of pictures.
        cost = float(np.average([one.cost for one in known], weights=weights))
        groups = np.minimum(chance.geometric(0.6, pictures), MOST_PICTURES)
        groups = groups[: np.searchsorted(np.cumsum(groups), pictures) + 1]
        gaps = chance.exponential(groups.mean() * cost / (self._size * load), len(groups))
        owners = chance.integers(world.services, size=len(groups)).tolist()
        drawn = chance.random(groups.sum()) * popularity[-1]
        which = iter(np.searchsorted(popularity, drawn).tolist())
        for now, owner, group in zip(np.cumsum(gaps), owners, groups, strict=True):
            yield float(now), owner, [known[next(which)] for _ in range(group)]


def _figures(simulation: Simulation, since: Mark) -> Figures:
    p50, p99 = np.percentile(simulation.waits[since.pictures :], (50, 99))
    done = np.array(simulation.work) - np.array(since.work)
    return Figures(
        (float(p50), float(p99)),
        float(np.percentile(simulation.requests[since.requests :], 99)),
        float(np.mean(simulation.hits[since.pictures :])),
        float(done.max() / done.mean()),
    )


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fleets", type=int, nargs="+", default=[4, 16, 100, 1000])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.9, 1.5])
    parser.add_argument("--services", type=int, default=4, help="LLM services that ask")
    parser.add_argument("--skew", type=float, default=0.9, help="Zipf's exponent")
    parser.add_argument("--pictures", type=int, default=20_000, help="of each run, at least")
    parser.add_argument("--policies", nargs="+", default=[""], help="words of their names")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if min(*asked.fleets, asked.services, asked.pictures) < 1 or min(asked.loads) <= 0:
        parser.error("--fleets, --services, --pictures and --loads are more than 0")
    if not any(word in name for word in asked.policies for name in POLICIES):
        parser.error(f"--policies: none has such a name; there are {', '.join(POLICIES)}")
    return asked


def main() -> None:
    """Prints a table in Markdown, a row as soon as it is known."""
    asked = arguments()
    world = World(asked.services, asked.skew, asked.pictures, asked.seed)
    names = [name for name in POLICIES if any(word in name for word in asked.policies)]
    print(*_head(asked.loads), sep="\n")
    # The bar on stderr, rows on stdout: both may be the same terminal.
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        bar = progress.add_task("", total=len(asked.fleets) * len(names))
        for size in asked.fleets:
            trace = Trace(size, world)
            for name in names:
                progress.update(bar, description=f"{size} encoders, {name}")
                print(_row(size, name, trace, asked.loads), flush=True)
                progress.advance(bar)


def _head(loads: Sequence[float]) -> tuple[str, str]:
    figures = ("request p99", "hits", "busiest", "hits before", "one added", "one lost")
    columns = [*(f"wait p50 / p99 at {load}" for load in loads), *figures]
    return f"| encoders | policy | {' | '.join(columns)} |", "|---:|---|" + "---:|" * len(columns)


def _row(size: int, name: str, trace: Trace, loads: Sequence[float]) -> str:
    found = {load: trace.figures(POLICIES[name], load) for load in {*loads, DETAIL_LOAD}}
    detail, changed = found[DETAIL_LOAD], trace.churn(POLICIES[name])
    cells = [
        str(size),
        name,
        *(f"{found[load].waits[0]:.2f} / {found[load].waits[1]:.1f}" for load in loads),
        f"{detail.request_p99:.1f}",
        f"{detail.hit_rate:.1%}",
        f"{detail.busiest:.2f}",
        f"{changed.before:.1%}",
        f"{changed.added:.1%}",
        f"{changed.lost:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
