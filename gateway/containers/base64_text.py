"""Base64 as people send it -> bytes, with the size bound checked before anything is decoded.

Blanks, line breaks, missing padding, the URL-safe alphabet (RFC 4648, section 5) and percent
escapes of `+ / =` are accepted; every other character is refused.
"""

import binascii
import re
from typing import Final

import pybase64

from gateway.containers.array import ContainerError, ContainerTooLarge

_BLANKS: Final = " \t\r\n\f\v"
_FROM_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_ESCAPE: Final = re.compile(rb"%(?:2[BbFf]|3[Dd])")
_ESCAPED: Final = {b"%2B": b"+", b"%2F": b"/", b"%3D": b"="}
_MOST_ESCAPES: Final = 2**16  # each costs a call; a client that escapes sends short texts


def decode_base64(text: str, *, limit_bytes: int, what: str = "the embedding") -> bytes:
    """The bytes that `text` stands for, at most `limit_bytes` of them and at least one.

    Raises `ContainerTooLarge` before decoding where the text is too long, else `ContainerError`.
    """
    if not text.isascii():
        raise _bad("a character outside ASCII", what)
    _check_length(text, limit_bytes, what)
    try:
        data = pybase64.b64decode(text, validate=True)
    except binascii.Error:
        data = _decode_untidy(text.encode("ascii"), what)
    if not data:
        raise ContainerError("base64", f"{what} holds 0 bytes; send the base64 of a file")
    return data


def _check_length(text: str, limit_bytes: int, what: str) -> None:
    if len(text) * 3 // 4 <= limit_bytes:
        return
    idle = sum(map(text.count, (*_BLANKS, "=", "%3D", "%3d"))) + 2 * text.count("%")
    count = (len(text) - idle) * 3 // 4
    if count > limit_bytes:
        found = f"{what}'s base64 stands for {count} bytes; the limit is {limit_bytes}"
        raise ContainerTooLarge("base64", found)


def _decode_untidy(encoded: bytes, what: str) -> bytes:
    plain = _unescape(encoded, what).translate(_FROM_URL_SAFE, _BLANKS.encode()).rstrip(b"=")
    try:
        return pybase64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except binascii.Error:
        raise _bad("a wrong character or length", what) from None


def _unescape(encoded: bytes, what: str) -> bytes:
    escapes = encoded.count(b"%")
    if escapes > _MOST_ESCAPES:
        raise _bad(f"more than {_MOST_ESCAPES} percent escapes", what)
    return _ESCAPE.sub(lambda m: _ESCAPED[m[0].upper()], encoded) if escapes else encoded


def _bad(found: str, what: str) -> ContainerError:
    text = f"{what}'s base64 has {found}; send RFC 4648 base64 of the file's bytes"
    return ContainerError("base64", text)
