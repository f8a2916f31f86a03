"""In which order pictures are served: pure, no clock and no thread of its own.

Whoever waits comes in the order of

    arrival + stretch * cost        (all in seconds; cost: what its own work is estimated to take)

the smaller first, equals in the order of their coming. That is earliest deadline first where every
picture may wait the same multiple of its own cost (Bender, Chakrabarti and Muthukrishnan, "Flow and
stretch metrics for scheduling continuous job streams", 1998). The key never changes, so:

- A picture is passed only by those that came within `stretch * (its cost - theirs)` after it:
  after that time nobody who comes can delay it any more, however many come. Nothing starves.
- A dearer picture goes before a cheaper one only if it came `stretch * (the difference)` earlier,
  or if it had begun already: work is not interrupted.
- Those of equal cost keep the order of their coming. `stretch` 0 is first come, first served.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# What the past counts once so much new work was seen as the last time: 0.8 of each figure stays.
_KEPT = 0.8


def key_of(arrival: float, cost: float, stretch: float) -> float:
    """Where a picture stands in a line; all in seconds, `stretch` a plain number of at least 0."""
    return arrival + stretch * cost


@dataclass(frozen=True)
class Rate:
    """Cost of a unit of work as it was of late: sums that fade.

    A sum over a sum, and not a mean of quotients: small pieces of work, with their fixed cost, must
    not make large ones look dear.
    """

    units: float = 0.0
    cost: float = 0.0

    def with_seen(self, units: float, cost: float) -> "Rate":
        """The rate once work of `units` was seen to cost `cost`."""
        return Rate(_KEPT * self.units + units, _KEPT * self.cost + cost)

    def of(self, units: float) -> float:
        """What `units` will cost; 0 as long as nothing was seen."""
        return units * self.cost / self.units if self.units else 0.0


class Line(Generic[T]):
    """Who waits, the smallest key first; one may leave before its turn.

    A sorted list: a line has hundreds of members, and moving pointers takes nanoseconds.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, T]] = []
        self._places: dict[T, tuple[float, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, item: T, key: float) -> None:
        """`item`, which must not be in the line, takes its place."""
        self._count += 1
        self._places[item] = key, self._count
        insort(self._entries, (key, self._count, item), key=_place)

    def discard(self, item: T) -> None:
        """Takes `item` out, if it is there."""
        place = self._places.pop(item, None)
        if place is not None:
            del self._entries[bisect_left(self._entries, place, key=_place)]

    def first(self) -> T | None:
        return self._entries[0][2] if self._entries else None

    def take(self) -> T:
        """Takes the first one out. Raises IndexError where nobody waits."""
        _, _, item = self._entries.pop(0)
        del self._places[item]
        return item


def _place(entry: tuple[float, int, T]) -> tuple[float, int]:
    return entry[:2]
