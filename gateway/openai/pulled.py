"""Large base64 texts of a body, decoded where they lie before the JSON around them is parsed.

A JSON parser holds the interpreter while it makes a text of twenty megabytes; the base64 decoder
lets go of it, so in a thread it delays nobody. What is pulled leaves a ticket in its place: a short
text that no sender can guess. The texts around it stay as they are, so the JSON is as valid or as
invalid as before.
"""

import asyncio
import binascii
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pybase64

Data = Mapping[str, bytes]
"""Ticket -> the bytes that the text in its place stood for."""

LARGE: Final = 1 << 18  # characters; the parser takes such a text in a third of a millisecond
_STEP: Final = LARGE // 2
_QUOTE: Final = b'"'
_BACKSLASH: Final = ord("\\")
_MAX_HEAD: Final = 1024  # bytes of a data URL before its comma
_HEAD: Final = re.compile(rb'\s*data:[^\x00-\x1f"\\,\x7f-\xff]*;\s*base64\s*,', re.IGNORECASE)
_LETTER: Final = re.compile(rb"[A-Za-z0-9+/]")


@dataclass(frozen=True)
class Pulled:
    """A body with tickets in place of `data`; both as they were if nothing was pulled."""

    body: bytes | bytearray
    data: Data


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


async def pull(body: bytearray) -> Pulled:
    """`body` without its large texts of sound base64."""
    if len(body) < LARGE:
        return Pulled(body, {})
    return await asyncio.to_thread(_pull, body)


def _pull(body: bytearray) -> Pulled:
    spans = list(_spans(body))
    if not spans:
        return Pulled(body, {})
    secret, data, reached = secrets.token_hex(16), {}, 0
    pieces: list[bytes | memoryview] = []
    with memoryview(body) as view:
        for number, span in enumerate(spans):
            decoded = _decode(view[span.start : span.end])
            if decoded is None:
                continue
            ticket = f"{secret}{number}"
            data[ticket] = decoded
            pieces += [bytes(view[reached : span.start]), ticket.encode()]
            reached = span.end
        pieces.append(bytes(view[reached:]))
    return Pulled(b"".join(pieces), data)


def _decode(encoded: memoryview) -> bytes | None:
    """None for untidy base64: then the parser sees the text, and the readers mend or refuse it."""
    try:
        return pybase64.b64decode(encoded, validate=True)
    except binascii.Error:
        return None


def _spans(body: bytearray) -> Iterator[_Span]:
    """Where long runs without a quote begin as base64 does; the run's quotes are then a text's.

    After a quote that ends a text no letter may follow, so one that a letter follows begins a text
    or the JSON is broken, with the ticket as without it.
    """
    reached = 0
    for probe in range(_STEP, len(body), _STEP):
        if probe < reached:
            continue
        begin = body.rfind(_QUOTE, reached, probe) + 1
        end = body.find(_QUOTE, probe)
        if end < 0:
            return
        reached = end
        if begin == 0 or end - begin < LARGE or (begin > 1 and body[begin - 2] == _BACKSLASH):
            continue
        start = _after_head(body, begin)
        if _LETTER.match(body, start) is not None:
            yield _Span(start, end)


def _after_head(body: bytearray, begin: int) -> int:
    head = _HEAD.match(body, begin, begin + _MAX_HEAD)
    return begin if head is None else head.end()


def all_placed(request: Any, data: Data) -> bool:
    """Whether every ticket of `data` stands where a picture or an embedding may."""
    if not data:
        return True
    found = {text.rpartition(",")[2] for text in _encoded_texts(request)}
    return data.keys() <= found


def _encoded_texts(request: Any) -> Iterator[str]:
    for part in _parts(request):
        for name in ("image_url", "image_embeds"):
            yield from _texts(part.get(name))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name in ("url", "data"):
            if isinstance(value.get(name), str):
                yield value[name]
        yield from _texts(value.get("image_embeds"))


def _parts(request: Any) -> Iterator[dict[str, Any]]:
    messages = request.get("messages") if isinstance(request, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from (part for part in content if isinstance(part, dict))
