"""Which bytes each token of a vocabulary stands for, whatever kind the tokenizer is of."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llm_service.engine.values import TokenDecoder

_Spell = Callable[[str], bytes]
# Metaspace drops every space of a text's first token.
_ALL_SPACES = 1 << 30
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_symbols() -> dict[str, int]:
    """GPT-2's table: the character that stands for each byte (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES_OF_SYMBOLS = _byte_symbols()


class TokenBytes:
    """Bytes of tokens, found as they are asked for and then kept.

    The bytes of an answer's tokens, joined, are the answer's text in UTF-8, but for what
    `text_start` tells. A special token, which is no text, has its spelling; an id that the
    tokenizer does not know has none.

    Attributes:
        plain: whether the text of any tokens is what their joined bytes say, byte for byte.
        stripped: spaces that a text loses at its start.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        decoder = tokenizer.backend_tokenizer.decoder
        rules = json.loads(decoder.__getstate__()) if decoder is not None else {}
        steps = rules["decoders"] if rules.get("type") == "Sequence" else [rules]
        self.plain = [step.get("type") for step in steps] == ["ByteLevel"]
        self.stripped = sum(_stripped(step) for step in steps)
        self._spell = _spelling(steps)
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes of one token."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether it is no text."""
        added = self._added.get(token_id)
        return added is not None and bool(added.special)

    def text_start(self, token: bytes) -> bytes:
        """What the bytes of a text's first token become there."""
        lost = len(token) - len(token.lstrip(b" "))
        return token[min(lost, self.stripped) :]

    def _find(self, token_id: int) -> bytes:
        if self.is_special(token_id):
            return str(self._added[token_id].content).encode()
        token = self._tokenizer.backend_tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._spell is None:
            return str(self._tokenizer.decode([token_id])).encode()
        return self._spell(token)


def _spelling(steps: list[Mapping[str, Any]]) -> _Spell | None:
    """How such a decoder spells one token; None where only decoding it tells."""
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return _spell_symbols
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    replaced = [pair for step in steps if (pair := _replaced(step)) is not None]
    if sum(step["type"] in {"Replace", "Metaspace"} for step in steps) != len(replaced):
        return None
    byte_fallback = "ByteFallback" in kinds
    return lambda token: _spell_words(token, replaced, byte_fallback=byte_fallback)


def _spell_symbols(token: str) -> bytes:
    try:
        return bytes([_BYTES_OF_SYMBOLS[symbol] for symbol in token])
    except KeyError:
        # An added token of other characters: the decoder takes those as they are.
        return token.encode()


def _spell_words(token: str, replaced: list[tuple[str, str]], *, byte_fallback: bool) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
    if byte is not None:
        return bytes([int(byte[1], 16)])
    for old, new in replaced:
        token = token.replace(old, new)
    return token.encode()


def _replaced(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _stripped(step: Mapping[str, Any]) -> int:
    if step.get("type") == "Strip" and step["content"] == " ":
        return int(step["start"])
    if step.get("type") == "Metaspace" and step["prepend_scheme"] != "never":
        return _ALL_SPACES
    return 0
