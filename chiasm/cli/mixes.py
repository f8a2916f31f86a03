"""Reads what `chiasm plan` is told about a load: numbers, and mixes of them with their shares.

A mix is `VALUE:SHARE,VALUE:SHARE,...`, whose shares add up to 1, or one value alone.
"""

import argparse
import math
import re
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
Size = tuple[int, int]
"""(width, height) in pixels."""

MOST_PICTURES: Final = 64
MOST_ROWS: Final = 1_000_000
MOST_SIDE: Final = 100_000
LEAST_SECONDS: Final = 1e-9
MOST_SECONDS: Final = 10_000.0
_SIZE: Final = re.compile(r"(\d+)x(\d+)")


def rows(text: str) -> tuple[tuple[int, float], ...]:
    """`576`, or `256:0.8,2304:0.2`."""
    return _mix(text, _row_count)


def sizes(text: str) -> tuple[tuple[Size, float], ...]:
    """`1024x768`, or `640x480:0.5,4032x3024:0.5`."""
    return _mix(text, _size)


def pictures(text: str) -> tuple[float, ...]:
    """The probability of 0, 1, 2, ... pictures: from a mix, or from a mean (`1.5`: 1 or 2)."""
    if ":" in text:
        shares = _mix(text, _picture_count)
        by_count = [0.0] * (max(count for count, _ in shares) + 1)
        for count, share in shares:
            by_count[count] += share
        return tuple(by_count)
    mean = _number(text)
    if not 0 <= mean <= MOST_PICTURES:
        raise argparse.ArgumentTypeError(f"pictures of a request are 0 to {MOST_PICTURES}")
    whole = math.floor(mean)
    more = mean - whole
    return (0.0,) * whole + ((1 - more, more) if more else (1.0,))


def wait(text: str) -> float:
    """A time to be kept."""
    number = seconds(text)
    if number == 0:
        raise argparse.ArgumentTypeError("a time to be kept is above 0")
    return number


def seconds(text: str) -> float:
    """0, or a time that work can take."""
    number = _number(text)
    if number != 0 and not LEAST_SECONDS <= number <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text} is no time of work: 0, or {LEAST_SECONDS:g} to {MOST_SECONDS:g} s"
        )
    return number


def within(least: float, most: float) -> Callable[[str], float]:
    """A number with both bounds, which are named where it is outside."""

    def read(text: str) -> float:
        number = _number(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text} is not within {least:g} to {most:g}")
        return number

    return read


def share(text: str) -> float:
    """A share of 1, 1 itself included."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: 0 to 1")
    return number


def utilisation(text: str) -> float:
    number = _number(text)
    if not 0 < number <= 0.98:
        raise argparse.ArgumentTypeError(f"{text} is no utilisation to plan for: above 0, to 0.98")
    return number


def _mix(text: str, read: Callable[[str], T]) -> tuple[tuple[T, float], ...]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and ":" not in text:
        return ((read(text.strip()), 1.0),)
    mix = []
    for part in parts:
        value, colon, weight = part.partition(":")
        if not colon:
            raise argparse.ArgumentTypeError(f"{part!r} has no share; write VALUE:SHARE")
        mix.append((read(value), share(weight)))
    total = sum(weight for _, weight in mix)
    if not math.isclose(total, 1, abs_tol=1e-3):
        raise argparse.ArgumentTypeError(f"the shares add up to {total:g}; they must add up to 1")
    return tuple((value, weight / total) for value, weight in mix)


def _row_count(text: str) -> int:
    return _whole(text, 1, MOST_ROWS, "rows of a picture")


def _picture_count(text: str) -> int:
    return _whole(text, 0, MOST_PICTURES, "pictures of a request")


def _size(text: str) -> Size:
    match = _SIZE.fullmatch(text)
    if match is None or not all(1 <= int(side) <= MOST_SIDE for side in match.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write WIDTHxHEIGHT in pixels")
    return int(match[1]), int(match[2])


def _whole(text: str, least: int, most: int, what: str) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text[:12]) <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: {what} are a whole number, {least} to {most}")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return number
