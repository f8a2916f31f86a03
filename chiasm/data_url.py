"""`data:` URLs (RFC 2397) -> bytes, with the size bound checked before anything is decoded.

    data:[<type>/<subtype>][;<attribute>=<value>]...[;base64],<data>

The first comma ends the head. The media type is reported, never believed: the content decides.
Base64 is read as people send it: line breaks and blanks, missing padding, the URL-safe alphabet
(RFC 4648, section 5) and percent escapes are all accepted.
"""

import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import pybase64

DataUrlCode: TypeAlias = Literal[
    "invalid_image_url", "invalid_base64_image", "empty_image_file", "image_file_too_large"
]

_SCHEME: Final = re.compile(r"\s*data:", re.IGNORECASE)
_WORD: Final = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_MEDIA_TYPE: Final = re.compile(f"{_WORD}/{_WORD}")
_MAX_HEAD: Final = 1024  # characters before the comma
_FORM: Final = "data:image/png;base64,<data>"
_BLANKS: Final = b" \t\r\n\f\v"
_FROM_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_MOST_PER_LETTER: Final = 6  # characters that escapes and blanks may make of one base64 letter
_ESCAPE_BLOCK: Final = 2**20  # bytes unescaped at a time, so that scratch memory stays bounded


@dataclass(frozen=True, slots=True)
class DataUrl:
    """`media_type`: lower case, `text/plain` where the URL names none. `data`: decoded bytes."""

    media_type: str
    data: bytes


class DataUrlError(Exception):
    """A URL that gives no bytes. `message` is safe for the wire: it repeats nothing of the URL."""

    def __init__(self, code: DataUrlCode, message: str) -> None:
        super().__init__(code, message)
        self.code: Final[DataUrlCode] = code
        self.message: Final[str] = message

    def __str__(self) -> str:
        return self.message


def parse_data_url(url: str, max_bytes: int) -> DataUrl:
    """The media type and the bytes of a data URL holding at most `max_bytes` decoded bytes.

    Raises `DataUrlError`: `invalid_image_url` (not a data URL, or against its grammar),
    `invalid_base64_image`, `empty_image_file`, `image_file_too_large`.
    """
    start, comma = _find_head(url)
    media_type, is_base64 = _parse_head(url[start:comma])
    payload = _ascii(url, comma + 1, is_base64=is_base64)
    data = (_decode_base64 if is_base64 else _unescape)(payload, max_bytes)
    if not data:
        raise DataUrlError("empty_image_file", "the data URL holds 0 bytes; put the data after ','")
    _check(len(data), max_bytes)
    return DataUrl(media_type, data)


def _find_head(url: str) -> tuple[int, int]:
    scheme = _SCHEME.match(url)
    if scheme is None:
        text = f"the image URL needs to be a data URL ({_FORM}) or an http(s) URL"
        raise DataUrlError("invalid_image_url", text)
    comma = url.find(",", scheme.end(), scheme.end() + _MAX_HEAD)
    if comma < 0:
        text = f"the data URL has no ',' in its first {_MAX_HEAD} characters; the form is {_FORM}"
        raise DataUrlError("invalid_image_url", text)
    return scheme.end(), comma


def _parse_head(head: str) -> tuple[str, bool]:
    media_type, *parameters = (part.strip() for part in head.split(";"))
    if media_type and not _MEDIA_TYPE.fullmatch(media_type):
        text = f"the data URL's media type is not of the form type/subtype; the form is {_FORM}"
        raise DataUrlError("invalid_image_url", text)
    is_base64 = any(parameter.lower() == "base64" for parameter in parameters)
    return media_type.lower() or "text/plain", is_base64


def _ascii(url: str, start: int, *, is_base64: bool) -> memoryview:
    try:
        return memoryview(url.encode("ascii"))[start:]  # a slice of the str would be a second copy
    except UnicodeEncodeError:
        code: DataUrlCode = "invalid_base64_image" if is_base64 else "invalid_image_url"
        raise DataUrlError(code, "the data URL has characters outside ASCII; encode them") from None


def _check(count: int, max_bytes: int) -> None:
    if count > max_bytes:
        text = f"the data URL holds more than {max_bytes} bytes; send a smaller file"
        raise DataUrlError("image_file_too_large", text)


def _decode_base64(payload: memoryview, max_bytes: int) -> bytes:
    if len(payload) // 4 * 3 > max_bytes + 2:  # up to two '=' stand for nothing
        return _decode_untidy_base64(payload, max_bytes)
    try:
        return pybase64.b64decode(payload, validate=True)
    except binascii.Error:
        return _decode_untidy_base64(payload, max_bytes)


def _decode_untidy_base64(payload: memoryview, max_bytes: int) -> bytes:
    _check(len(payload) // (_MOST_PER_LETTER * 4) * 3, max_bytes)
    try:
        plain = _unescape(payload, len(payload))
    except DataUrlError:
        raise _bad_base64() from None
    text = plain.translate(_FROM_URL_SAFE, _BLANKS).rstrip(b"=")
    _check(len(text) * 3 // 4, max_bytes)
    try:
        return pybase64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise _bad_base64() from None


def _bad_base64() -> DataUrlError:
    text = f"the data URL's base64 has a wrong character or length; the form is {_FORM}"
    return DataUrlError("invalid_base64_image", text)


def _unescape(payload: memoryview, max_bytes: int) -> bytes:
    """Percent decoding (RFC 3986, section 2.1); the count is bounded before any is done."""
    _check(len(payload) // 3, max_bytes)
    text = bytes(payload)
    escapes = text.count(b"%")
    _check(len(text) - 2 * escapes, max_bytes)
    if not escapes:
        return text
    return b"".join(_unescape_block(block) for block in _blocks(text))


def _blocks(text: bytes) -> Iterator[bytes]:
    """Slices that end where no escape is cut in two."""
    start = 0
    while start < len(text):
        end = start + _ESCAPE_BLOCK
        at = text.rfind(b"%", end - 2, end)
        end = end if at < 0 else at
        yield text[start:end]
        start = end


def _unescape_block(block: bytes) -> bytes:
    codes = np.frombuffer(block, dtype=np.uint8)
    at = np.flatnonzero(codes == ord("%"))
    if at.size == 0:
        return block
    if at[-1] + 2 >= codes.size:
        raise _bad_escape()
    high, low = _HEX_VALUES[codes[at + 1]], _HEX_VALUES[codes[at + 2]]
    if max(high.max(), low.max()) > 15:
        raise _bad_escape()
    decoded, keep = codes.copy(), np.ones(codes.size, dtype=bool)
    decoded[at] = high << 4 | low
    keep[at + 1] = keep[at + 2] = False
    return decoded[keep].tobytes()


def _bad_escape() -> DataUrlError:
    text = "the data URL has a '%' without two hexadecimal digits; write '%' itself as %25"
    return DataUrlError("invalid_image_url", text)


_HEX_VALUES: Final = np.full(256, 255, dtype=np.uint8)  # 255: not a hexadecimal digit
for _value, _digit in enumerate("0123456789abcdef"):
    _HEX_VALUES[[ord(_digit), ord(_digit.upper())]] = _value
