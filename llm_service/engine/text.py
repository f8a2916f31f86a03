"""Token ids to text as they come: whole characters only, and no part of a stop text."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from llm_service.engine.token_bytes import TokenBytes
from llm_service.engine.values import TokenDecoder

_BROKEN = "\ufffd"
# Tokens, and so marks, of a character of 4 bytes that lacks its last.
_LONGEST_BROKEN_TAIL = 3
# Tokens that are no text at all would grow the window, and the cost of decoding it, without end.
_LONGEST_WINDOW, _KEPT_TOKENS = 64, 16


class TextStream(Protocol):
    """Decodes one answer incrementally; the pieces join to the text of all its tokens."""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while a character is incomplete."""

    def close(self) -> str:
        """The rest, with a mark for a character that never was completed."""


def text_stream(tokenizer: TokenDecoder, token_bytes: TokenBytes) -> TextStream:
    """The cheapest stream that is exact for this tokenizer."""
    return ByteStream(token_bytes) if token_bytes.plain else WindowStream(tokenizer, token_bytes)


class ByteStream:
    """For tokenizers whose text is the UTF-8 of their tokens' joined bytes."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while a character is incomplete."""
        if self._bytes.is_special(token_id):
            return ""
        return self._decoder.decode(self._bytes.of(token_id))

    def close(self) -> str:
        """The rest, with a mark for a character that never was completed."""
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any tokenizer.

    A token's text depends on the tokens before it (leading spaces, characters of several tokens),
    so a window of tokens is decoded, and what it adds to the text already given out is new. The
    window starts at the token that last completed some text.
    """

    def __init__(self, tokenizer: TokenDecoder, token_bytes: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._bytes = token_bytes
        self._window: list[int] = []
        self._given = 0  # tokens of the window whose text is given out in full
        self._given_text = ""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while a character is incomplete."""
        # Decoding leaves these out before it looks at what stands beside what.
        if self._bytes.is_special(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_BROKEN):
            return self._push_broken(text)
        new = text[len(self._given_text) :]
        if new:
            self._slide()
        return new

    def close(self) -> str:
        """The rest, with a mark for a character that never was completed."""
        rest = self._decode(self._window)[len(self._given_text) :]
        self._window, self._given, self._given_text = [], 0, ""
        return rest

    def _push_broken(self, text: str) -> str:
        certain = self._without_mendable(text)
        new = certain[len(self._given_text) :]
        if new:
            self._given_text = certain
        if len(self._window) > _LONGEST_WINDOW:
            self._window, self._given = self._window[-_KEPT_TOKENS:], 0
            self._given_text = self._without_mendable(self._decode(self._window))
        return new

    def _without_mendable(self, text: str) -> str:
        """`text` without the marks at its end that coming tokens may still mend.

        Byte-fallback decoders turn a whole run of bytes into marks while its last character is
        incomplete; once more tokens have come than a character can lack, it never will be.
        """
        marks = len(text) - len(text.rstrip(_BROKEN))
        if len(self._window) - self._given > _LONGEST_BROKEN_TAIL:
            marks = min(marks, _LONGEST_BROKEN_TAIL)
        return text[: len(text) - marks]

    def _slide(self) -> None:
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._given_text = self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


class StopFilter:
    """Passes text on until a stop text is complete, holding back what may yet become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that no stop text can claim, and whether a stop text was completed."""
        if not self._stops:
            return text, False
        text = self._held + text
        end = _first_stop(text, self._stops)
        if end is not None:
            self._held = ""
            return text[:end], True
        keep = _longest_beginning(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def close(self) -> str:
        """What was held back and became no stop text."""
        rest, self._held = self._held, ""
        return rest


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop text that is complete first begins.

    By its end, not its begin: so the answer does not depend on how text was cut into tokens.
    """
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop text."""
    return max(_beginning(text, stop) for stop in stops)


def _beginning(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` and is not all of it."""
    place = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while place >= 0:
        if stop.startswith(text[place:]):
            return len(text) - place
        place = text.find(stop[0], place + 1)
    return 0
