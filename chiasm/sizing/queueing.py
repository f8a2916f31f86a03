"""How long work waits before servers that are alike: two ways to queue, one load.

`OneQueue` is the queue of textbooks, M^X/G/c: groups of random size arrive at random (Poisson) and
wait in one line for whichever of c servers is free. `Placed` is what an encoder fleet does: each
picture goes at once to the less loaded of two servers, chosen by its digest, and waits there.

One queue. With exponential service the states form a chain that is solved by balancing each cut
between n and n + 1 (Tijms, "A First Course in Stochastic Models", 2003, chapter 9). Other services
stretch its times by the ratio of two moments at which one server is exact (Pollaczek and Khinchin,
with groups). Without groups that is the approximation of Lee and Longton (1959), which Allen and
Cunneen extend (Allen, "Probability, Statistics, and Queueing Theory", 1990).

Placed. For ever more servers the load of each has a closed form (Hellemans and Van Houdt, "On the
power-of-d-choices with least loaded server selection", 2018). For two servers placing is the same
as one queue. In between both are joined by a norm, and what a group's members wait for one another
is added; its constants were chosen by a simulation. The two moments stretch the times here too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

MOST_SERVERS: Final = 4096
# Probability of the states left out beyond the last.
_TAIL: Final = 1e-10
_MOST_STATES: Final = 400_000
# How `Placed` joins its limits, chosen by `python -m benchmarks.sizing waits`. Outstanding rows are
# less than the whole truth about a server's load, which costs half as much again as in theory.
_BLIND: Final = 1.5
_MEAN_POWER, _QUANTILE_POWER = 1.5, 2.0
# A late member of a group waits longer than the mean one.
_LATE: Final = 2.0


class Overloaded(Exception):
    """More work arrives than the servers do: no wait is long enough."""


@dataclass(frozen=True)
class Load:
    """What arrives.

    Attributes:
        groups_per_second: of arrivals at random times.
        sizes: probability that a group has 0, 1, 2, ... members; adds up to 1.
        seconds: mean of the service of one member.
        variation: squared coefficient of variation of the service (variance over squared mean).
    """

    groups_per_second: float
    sizes: tuple[float, ...]
    seconds: float
    variation: float = 0.0

    def __post_init__(self) -> None:
        if not math.isclose(sum(self.sizes), 1, abs_tol=1e-9) or min(self.sizes) < 0:
            raise ValueError("the probabilities of group sizes must be at least 0 and add up to 1")
        if min(self.groups_per_second, self.seconds, self.variation) < 0:
            raise ValueError("rates, seconds and variation are at least 0")

    @property
    def rate(self) -> float:
        """Members a second."""
        return self.groups_per_second * sum(n * share for n, share in enumerate(self.sizes))

    @property
    def work(self) -> float:
        """Servers that are busy on average: seconds of service that arrive in a second."""
        return self.rate * self.seconds

    @property
    def clumping(self) -> float:
        """Variance over mean of the members that arrive in some time: 1 if each comes alone."""
        mean = sum(n * share for n, share in enumerate(self.sizes))
        return sum(n * n * share for n, share in enumerate(self.sizes)) / mean if mean else 1.0


class Waits(Protocol):
    """Waits before service, in seconds, of a member that arrives in a steady state."""

    @property
    def mean(self) -> float: ...

    def quantile(self, share: float) -> float:
        """The wait that this share of the members does not exceed."""
        ...


def utilisation(load: Load, servers: int) -> float:
    """Share of the servers' time that is busy; 1 and more is overload."""
    return load.work / servers


class OneQueue:
    """Waits of one line before `servers`. Raises Overloaded at a utilisation of 1 and more."""

    def __init__(self, load: Load, servers: int) -> None:
        self._busy = _checked(load, servers)
        self._load, self._servers = load, servers

    @property
    def mean(self) -> float:
        """Exact for one server; else see docs/operations.md for the error."""
        if not self._load.work:
            return 0.0
        ahead = (max(n - self._servers + 1, 0) * p for n, p in enumerate(self._ahead))
        return sum(ahead) * self._gap * self._stretch

    def quantile(self, share: float) -> float:
        if not self._load.work:
            return 0.0
        return _quantile(self._tail, share, self._gap) * self._stretch

    @property
    def _gap(self) -> float:
        """Mean seconds between the ends of services while all are busy."""
        return self._load.seconds / self._servers

    @property
    def _stretch(self) -> float:
        """Mean wait over that of exponential service, as it is exactly for one server."""
        clumped = self._load.clumping - 1
        return (self._busy * (1 + self._load.variation) + clumped) / (2 * self._busy + clumped)

    def _tail(self, seconds: float) -> float:
        """Probability of a longer wait, with exponential service.

        Who has n before it waits for n - servers + 1 ends, which come at random while all are busy.
        """
        passed = seconds / self._gap
        # P(fewer than k ends in that time), for k = 1, 2, ...; logarithms, as the first are tiny.
        logarithm, step = -passed, math.log(passed) if passed else -math.inf
        below, total = 0.0, 0.0
        for index, probability in enumerate(self._ahead[self._servers :], start=1):
            below += math.exp(logarithm)
            logarithm += step - math.log(index)
            total += probability * min(below, 1.0)
        return total

    @cached_property
    def _ahead(self) -> list[float]:
        """Probability that n are in the system or stand before it in its own group, by n."""
        states = self._states
        mean = sum(n * share for n, share in enumerate(self._load.sizes))
        places = [
            sum(self._load.sizes[place + 1 :]) / mean for place in range(_longest(self._load))
        ]
        ahead = [0.0] * (len(states) + len(places) - 1)
        for n, probability in enumerate(states):
            for place, share in enumerate(places):
                ahead[n + place] += probability * share
        return ahead

    @cached_property
    def _states(self) -> list[float]:
        """Probability that n are in the system, by n, with exponential service."""
        larger = [sum(self._load.sizes[n + 1 :]) for n in range(_longest(self._load))]
        offered = self._load.groups_per_second * self._load.seconds
        weights = [1.0]
        total = 1.0
        while True:
            n = len(weights)
            up = sum(weights[n - 1 - k] * share for k, share in enumerate(larger[:n]))
            weights.append(offered * up / min(n, self._servers))
            total += weights[-1]
            if n > self._servers and weights[-1] < _TAIL * (1 - self._busy) * total:
                break
            if n > _MOST_STATES:
                raise Overloaded
            if total > 1e250:
                weights = [one / total for one in weights]
                total = 1.0
        return [one / total for one in weights]


class Placed:
    """Waits where each member goes to the less loaded of two of the `servers` and stays there.

    Raises Overloaded at a utilisation of 1 and more.
    """

    def __init__(self, load: Load, servers: int) -> None:
        self._busy = _checked(load, servers)
        self._load, self._servers = load, servers
        self._joined = OneQueue(load, servers)

    @property
    def mean(self) -> float:
        if self._servers <= 2:
            return self._joined.mean
        return _norm(self._joined.mean, _BLIND * self._pairs_mean, _MEAN_POWER) + self._crowding

    def quantile(self, share: float) -> float:
        joined = self._joined.quantile(share)
        if self._servers <= 2:
            return joined
        pairs = _quantile(self._pairs_tail, share, self._load.seconds)
        return _norm(joined, _BLIND * pairs, _QUANTILE_POWER) + _LATE * self._crowding

    @cached_property
    def _crowding(self) -> float:
        """What a group's members wait for one another more than in one queue, when all is idle."""
        members = sum(n * share for n, share in enumerate(self._load.sizes))
        if not members:
            return 0.0
        extra = sum(
            share * (_ahead_in_pairs(n, self._servers) - _ahead_in_line(n, self._servers))
            for n, share in enumerate(self._load.sizes)
        )
        return max(extra, 0.0) / members * self._load.seconds

    @cached_property
    def _pairs_mean(self) -> float:
        """The integral of the tail: with u = exp(-w) a rational function of u."""
        if not self._busy:
            return 0.0
        a, b = self._busy, 1 / self._busy - self._busy
        integral = (math.log((a + b) / b) - a / (a + b)) / a**2
        return integral * self._scale

    @property
    def _scale(self) -> float:
        return self._load.seconds * (1 + self._load.variation) / 2

    def _pairs_tail(self, seconds: float) -> float:
        """Probability that both of two servers, of very many, have more work than so long."""
        exponent = min(seconds / self._scale, 700) if self._scale else 700
        grown = math.exp(exponent)
        return 1 / (self._busy + (1 / self._busy - self._busy) * grown) ** 2 if self._busy else 0.0


def thinned(sizes: Sequence[float], kept: float) -> tuple[float, ...]:
    """Group sizes after each member stays with probability `kept`."""
    out = [0.0] * len(sizes)
    for n, share in enumerate(sizes):
        for k in range(n + 1):
            out[k] += share * math.comb(n, k) * kept**k * (1 - kept) ** (n - k)
    return tuple(out)


def _checked(load: Load, servers: int) -> float:
    if not 1 <= servers <= MOST_SERVERS:
        raise ValueError(f"servers are 1 to {MOST_SERVERS}")
    busy = utilisation(load, servers)
    if busy >= 1:
        raise Overloaded
    return busy


def _longest(load: Load) -> int:
    return max(len(load.sizes) - 1, 1)


def _norm(one: float, other: float, power: float) -> float:
    return float((one**power + other**power) ** (1 / power))


def _ahead_in_line(members: int, servers: int) -> float:
    """Services that members of a group wait for, one after the other; summed over all of them."""
    return float(sum(place // servers for place in range(members)))


def _ahead_in_pairs(members: int, servers: int) -> float:
    """The same where each goes to the emptier of two servers, by mean numbers of servers."""
    holding = [0.0] * (members + 1)  # servers with more than so many of the group
    total = 0.0
    for _ in range(members):
        # Both servers of the pair have more than so many.
        both = [max(n * (n - 1), 0.0) / (servers * (servers - 1)) for n in holding]
        total += sum(both)
        for level, share in enumerate(both):
            holding[level] += (both[level - 1] if level else 1.0) - share
    return total


def _quantile(tail: Callable[[float], float], share: float, unit: float) -> float:
    """Where a falling `tail` reaches 1 - share: brackets from `unit` seconds, then halves."""
    left = 1 - share
    if tail(0.0) <= left:
        return 0.0
    low, high = 0.0, unit
    while tail(high) > left:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > left else (low, middle)
    return high
