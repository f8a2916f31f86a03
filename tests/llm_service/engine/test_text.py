"""Text comes in whole characters, and no part of a stop text is ever shown."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from llm_service.engine.text import ByteStream, StopFilter, TextStream, WindowStream
from llm_service.engine.token_bytes import TokenBytes
from llm_service.engine.values import TokenDecoder
from tests.llm_service.engine.rig import EOS, ids_of, tokenizer

BYTES = tokenizer()
TOKEN_BYTES = TokenBytes(BYTES)
# Both are exact for a tokenizer of bytes.
STREAMS = {
    "bytes": lambda: ByteStream(TOKEN_BYTES),
    "window": lambda: WindowStream(BYTES, TOKEN_BYTES),
}
both = pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
Stream = Callable[[], TextStream]


def _pieces(stream: Stream, tokens: list[int]) -> list[str]:
    opened = stream()
    return [*[opened.push(token) for token in tokens], opened.close()]


@both
def test_a_character_of_several_tokens_comes_whole_with_its_last(stream: Stream) -> None:
    pieces = _pieces(stream, list(ids_of("é€🦊!")))
    assert pieces == ["", "é", "", "", "€", "", "", "", "🦊", "!", ""]


@both
def test_special_tokens_are_no_text(stream: Stream) -> None:
    assert _pieces(stream, [*ids_of("a"), EOS, *ids_of("b")]) == ["a", "", "b", ""]


@both
def test_a_character_cut_off_by_the_end_is_marked(stream: Stream) -> None:
    assert "".join(_pieces(stream, list(ids_of("ok🦊"))[:-1])) == "ok\ufffd"


@both
def test_bytes_that_are_no_text_do_not_pile_up(stream: Stream) -> None:
    pieces = _pieces(stream, [ids_of("é")[1]] * 500)
    assert "".join(pieces) == "\ufffd" * 500
    assert max(map(len, pieces[:-1])) == 1


@both
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_the_pieces_of_text_join_to_it_with_no_mark_in_between(stream: Stream, text: str) -> None:
    pieces = _pieces(stream, list(ids_of(text)))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@both
@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 259), max_size=90))
def test_the_pieces_of_any_tokens_join_to_their_decoding(stream: Stream, tokens: list[int]) -> None:
    assert "".join(_pieces(stream, tokens)) == BYTES.decode(tokens, skip_special_tokens=True)


def sentencepiece_like() -> TokenDecoder:
    words = ["<unk>", "▁Hello", "▁world", "!", "<0xE2>", "<0x82>", "<0xAC>", "▁"]
    vocabulary = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast: Any = PreTrainedTokenizerFast
    decoder: TokenDecoder = fast(tokenizer_object=core, unk_token="<unk>")
    return decoder


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], [7, 1, 2], [1, 4, 5, 6, 2, 4, 5, 6, 4, 5, 6, 3], [4, 5, 6, 7, 7, 1]]
)
def test_spaces_and_byte_fallback_join_to_the_whole_decoding(tokens: list[int]) -> None:
    words = sentencepiece_like()
    pieces = _pieces(lambda: WindowStream(words, TokenBytes(words)), tokens)
    assert "".join(pieces) == words.decode(tokens, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


def _shown(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    stop_filter = StopFilter(stops)
    shown = ""
    for piece in pieces:
        text, stopped = stop_filter.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + stop_filter.close(), False


def test_text_that_may_become_a_stop_is_held_back_until_decided() -> None:
    stop_filter = StopFilter(("</end>",))
    assert stop_filter.push("so </e") == ("so ", False)
    assert stop_filter.push("nough") == ("</enough", False)
    assert stop_filter.push(" </") == (" ", False)
    assert stop_filter.push("end> more") == ("", True)


def test_the_stop_that_is_complete_first_ends_the_text() -> None:
    assert _shown(("abc", "b"), ["xabc"]) == ("xa", True)


def test_what_was_held_back_and_became_no_stop_is_shown_at_the_end() -> None:
    assert _shown(("abc",), ["xa", "b"]) == ("xab", False)


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_how_text_is_cut_into_tokens_does_not_matter(stops: list[str], pieces: list[str]) -> None:
    shown, stopped = _shown(tuple(stops), pieces)
    letters = [letter for piece in pieces for letter in piece]
    assert (shown, stopped) == _shown(tuple(stops), letters)
    assert stopped or shown == "".join(pieces)
    assert not any(stop in shown for stop in stops)


@both
def test_tokens_that_are_no_text_do_not_pile_up(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = stream()
    decoded = [0]
    if isinstance(opened, WindowStream):
        decode = opened._decode

        def noted(token_ids: list[int]) -> str:
            decoded.append(len(token_ids))
            return decode(token_ids)

        monkeypatch.setattr(opened, "_decode", noted)
    pieces = [opened.push(token) for token in [*ids_of("So"), *[EOS] * 500, *ids_of(" be it")]]
    assert "".join((*pieces, opened.close())) == "So be it"
    assert max(decoded) < 20


STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


@given(text=st.text("ab", max_size=12), stops=STOPS)
def test_what_is_held_back_is_the_longest_end_that_may_become_a_stop(
    text: str, stops: list[str]
) -> None:
    shown, stopped = StopFilter(stops).push(text)
    if not stopped:
        ends = [text[len(text) - size :] for size in range(len(text) + 1)]
        begins = [end for end in ends if any(stop.startswith(end) for stop in stops)]
        assert text == shown + max(begins, key=len)
