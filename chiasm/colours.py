"""Colours as settings and identities write them: `#rrggbb` in lower case."""

import re
from typing import Final

WHITE: Final = "#ffffff"
_NAMED: Final = {"white": WHITE, "black": "#000000"}
_FORM: Final = re.compile(r"#[0-9a-f]{6}", re.ASCII)


def canonical(text: str) -> str:
    """`white`, `black` or `#rrggbb`, of any case, as `#rrggbb`. Raises ValueError."""
    lower = text.strip().lower()
    colour = _NAMED.get(lower, lower)
    if not _FORM.fullmatch(colour):
        raise ValueError("a colour is white, black or #rrggbb, six hexadecimal digits")
    return colour


def to_rgb(text: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255. Raises ValueError as `canonical` does."""
    red, green, blue = bytes.fromhex(canonical(text)[1:])
    return red, green, blue
