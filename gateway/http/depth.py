"""How deeply a JSON text nests, before anything is built of it."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

_QUOTE: Final = b'"'
_BRACKETS: Final = b"[]{}"
_KEPT: Final = _BRACKETS + _QUOTE
_OTHERS: Final = bytes(set(range(256)) - set(_KEPT))
_STEPS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
# Bytes; pictures in base64 are longer, and to look for brackets in them holds up everybody.
_LONG: Final = 1 << 17


def nests_deeper(text: bytes | bytearray, limit: int) -> bool:
    """Whether arrays and objects of `text` lie more than `limit` deep in each other.

    For a text that is not JSON the answer may be either: the parser refuses it.
    """
    if not opens_more(text, limit):
        return False
    # Escapes first: a quote that ends no string must go, with what is before it.
    short = b"".join(_without_long_strings(text))
    plain = short.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    outside = b"".join(plain.split(_QUOTE)[::2])
    return max(accumulate(_STEPS[one] for one in outside), default=0) > limit


def opens_more(text: bytes | bytearray, limit: int) -> bool:
    """Whether there are more than `limit` opening brackets; `count` takes thirty times as long."""
    found = 0
    for bracket in (b"[", b"{"):
        at = text.find(bracket)
        while at >= 0:
            found += 1
            if found > limit:
                return True
            at = text.find(bracket, at + 1)
    return False


def _without_long_strings(text: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """`text` in pieces, without the inside of long strings that begin as base64 does.

    After a quote that ends a string no letter may follow, so one that a letter follows begins a
    string, or stands within one.
    """
    reached = looked = 0
    for probe in range(_LONG, len(text), _LONG):
        if probe < looked:
            continue
        begin, looked = text.rfind(_QUOTE, reached, probe) + 1, text.find(_QUOTE, probe)
        if looked < 0:
            break
        if begin and text[begin : begin + 1].isalnum() and text[looked - 1] != ord("\\"):
            yield text[reached:begin]
            reached = looked
    yield text[reached:]
