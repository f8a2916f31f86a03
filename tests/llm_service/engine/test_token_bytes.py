"""Bytes of tokens join to the text, whatever kind of tokenizer made it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from llm_service.engine.token_bytes import TokenBytes
from llm_service.engine.values import TokenDecoder
from tests.llm_service.engine.rig import EOS, VOCABULARY, tokenizer
from tests.llm_service.engine.test_text import sentencepiece_like

BYTES = tokenizer()


def _joined(token_bytes: TokenBytes, token_ids: list[int]) -> bytes:
    text = [one for one in token_ids if not token_bytes.is_special(one)]
    spelled = [token_bytes.of(one) for one in text]
    return b"".join([*map(token_bytes.text_start, spelled[:1]), *spelled[1:]])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40))
def test_bytes_of_a_byte_level_vocabulary_join_to_the_text(token_ids: list[int]) -> None:
    text = BYTES.decode(token_ids, skip_special_tokens=True)
    assert _joined(TokenBytes(BYTES), token_ids).decode(errors="replace") == text


def test_every_byte_has_its_token() -> None:
    token_bytes = TokenBytes(BYTES)
    assert [token_bytes.of(4 + byte) for byte in range(256)] == [bytes([b]) for b in range(256)]


@pytest.mark.parametrize(
    "token_ids",
    [[1, 2, 3], [7, 1, 2], [1, 4, 5, 6, 2], [4, 5, 6, 7, 7, 1], [0, 1, 2], [2, 0, 2], [7], []],
)
def test_bytes_of_words_with_byte_fallback_join_to_the_text(token_ids: list[int]) -> None:
    words = sentencepiece_like()
    text = words.decode(token_ids, skip_special_tokens=True)
    assert _joined(TokenBytes(words), token_ids).decode() == text


def test_a_part_of_a_character_is_its_byte_alone() -> None:
    token_bytes = TokenBytes(sentencepiece_like())
    assert [token_bytes.of(one) for one in (4, 5, 6)] == [b"\xe2", b"\x82", b"\xac"]


def test_a_special_token_has_its_spelling_and_an_unknown_id_nothing() -> None:
    token_bytes = TokenBytes(BYTES)
    assert (token_bytes.of(EOS), token_bytes.is_special(EOS)) == (b"</s>", True)
    assert (token_bytes.of(VOCABULARY + 5), token_bytes.is_special(VOCABULARY + 5)) == (b"", False)


def _words(decoder: Any, *added: str) -> TokenDecoder:
    vocabulary = {word: number for number, word in enumerate(["▁Hi", "▁you", "!", "##x"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    core.decoder = decoder
    core.add_tokens([AddedToken(word, special=False) for word in added])
    fast: Any = PreTrainedTokenizerFast
    made: TokenDecoder = fast(tokenizer_object=core)
    return made


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_vocabularies_join_to_the_text(scheme: Any) -> None:
    words = _words(decoders.Metaspace(prepend_scheme=scheme))
    token_bytes = TokenBytes(words)
    assert _joined(token_bytes, [0, 1, 2]).decode() == words.decode([0, 1, 2])


def test_added_tokens_that_are_text_join_to_it() -> None:
    words = _words(decoders.ByteLevel(), "<think>", "two words")
    token_bytes = TokenBytes(words)
    assert _joined(token_bytes, [4, 2, 5]).decode() == words.decode([4, 2, 5])
    assert token_bytes.of(5) == b"two words"


def test_a_kind_of_vocabulary_that_is_not_known_has_each_tokens_own_text() -> None:
    words = _words(decoders.WordPiece())
    assert not TokenBytes(words).plain
    assert TokenBytes(words).of(2).decode() == words.decode([2])
