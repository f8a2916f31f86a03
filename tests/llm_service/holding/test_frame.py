"""Bytes in a store that is not trusted."""

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.errors import ChiasmError, Reason
from llm_service.holding import frame
from llm_service.holding.frame import (
    FrameError,
    pack_binding,
    pack_rows,
    unpack_binding,
    unpack_rows,
)
from llm_service.holding.values import Binding
from tests.llm_service.holding.rig import CONTRACT, IDENTITY, rows, same

KEY = b"key"


@pytest.mark.parametrize("checked", [True, False])
def test_rows_come_back_bit_by_bit_with_their_claims(checked: bool) -> None:
    kept = rows(1, checked=checked)
    assert same(unpack_rows(KEY, pack_rows(KEY, kept, IDENTITY), CONTRACT), kept)


def test_an_alias_comes_back() -> None:
    for binding in (
        Binding("emb_x", b"r" * 32, b"f" * 32),
        Binding("emb_x", b"r" * 32),
    ):
        assert unpack_binding(KEY, pack_binding(KEY, binding)) == binding


def test_bytes_under_another_key_or_of_another_kind_are_no_frame() -> None:
    framed = pack_rows(KEY, rows(1), IDENTITY)
    alias = pack_binding(KEY, Binding("emb_x", b"r" * 32))
    with pytest.raises(FrameError):
        unpack_rows(b"other", framed, CONTRACT)
    with pytest.raises(FrameError):
        unpack_rows(KEY, alias, CONTRACT)
    with pytest.raises(FrameError):
        unpack_binding(KEY, framed)


def test_every_flipped_bit_is_found() -> None:
    framed = bytearray(pack_rows(KEY, rows(1), IDENTITY))
    for place in range(len(framed)):
        framed[place] ^= 1
        with pytest.raises(FrameError):
            unpack_rows(KEY, bytes(framed), CONTRACT)
        framed[place] ^= 1


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_frame(data: bytes) -> None:
    for framed in (data, b"chiasmE1" + data):
        with pytest.raises(FrameError):
            unpack_rows(KEY, framed, CONTRACT)
    with pytest.raises(FrameError):
        unpack_binding(KEY, b"chiasmA1" + data)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    evil = pickle.dumps(_Touch(mark))
    for framed in (evil, frame._framed(b"chiasmE1", KEY, evil)):
        with pytest.raises((FrameError, ChiasmError)):
            unpack_rows(KEY, framed, CONTRACT)
    assert not mark.exists()
    pickle.load(io.BytesIO(evil))
    assert mark.exists()  # it would have shown


class _Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def test_well_framed_rows_are_checked_as_a_callers_would_be() -> None:
    bad = rows(1)
    bad.rows[2, 3] = float("nan")
    with pytest.raises(ChiasmError) as failure:
        unpack_rows(KEY, pack_rows(KEY, bad, IDENTITY), CONTRACT)
    assert failure.value.reason is Reason.TENSOR_INVALID
    other = rows(1).rows.to(torch.float32)
    wide = torch.cat([other, other], dim=1)
    with pytest.raises(ChiasmError):
        unpack_rows(KEY, pack_rows(KEY, replace(rows(1), rows=wide), IDENTITY), CONTRACT)
    stranger = replace(IDENTITY, weights_digest="c" * 64)
    with pytest.raises(ChiasmError) as failure:
        unpack_rows(KEY, pack_rows(KEY, rows(1), stranger), CONTRACT)
    assert failure.value.reason is Reason.ENCODER_MISMATCH
