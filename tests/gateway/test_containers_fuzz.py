"""Damaged files end in a `ContainerError` or a sound array: nothing else, and no large memory."""

import io
import struct
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from gateway.containers import ContainerError, EmbeddingArray, decode_base64, read_embedding
from gateway.containers.torch_pickle import read_description
from tests.fuzz import containers

LIMIT = 2**16
PEAK = 2**18  # bytes: the limit, a header, and what the interpreter itself needs
ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
TENSOR = torch.arange(30.0).reshape(5, 6)


def _torch_file(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _npy_file(array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


FILES = {
    "torch": _torch_file(TENSOR),
    "torch view": _torch_file(TENSOR.t()[1:4, ::2]),
    "npy": _npy_file(TENSOR.numpy()),
    "npy fortran": _npy_file(np.asfortranarray(TENSOR.numpy())),
    "safetensors": safetensors.torch.save({"image_embeds": TENSOR.bfloat16()}),
}


def _description(payload: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(payload)) as records:
        return records.read("archive/data.pkl")


DESCRIPTIONS = [_description(FILES["torch"]), _description(_torch_file(torch.nn.Parameter(TENSOR)))]
# Pieces of descriptions, so that sequences of them are often nearly well-formed.
PIECES = [
    *(bytes([code]) for code in b"()tQR.\x85\x86\x87\x88\x89"),
    *(b"q\0", b"h\0", b"K\1", b"M\1\1", b"J\xff\xff\xff\xff", b"\x8a\1\x05"),
    *(b"X\x07\0\0\0storage", b"X\1\0\0\0000", b"ctorch\nFloatStorage\n"),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"\x80\2"),
]


def check_message(error: ContainerError) -> None:
    assert error.message.isascii()
    assert error.message.isprintable()
    assert len(error.message) < 800


def outcome(payload: bytes) -> EmbeddingArray | None:
    """The array, checked to be sound, or None where the payload was refused."""
    tracemalloc.start()
    try:
        array = read_embedding(payload, limit_bytes=LIMIT)
    except ContainerError as error:
        check_message(error)
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < PEAK
    assert 1 <= len(array.shape) <= 4
    assert all(extent >= 1 for extent in array.shape)
    assert array.data.nbytes == np.prod(array.shape) * ITEM_SIZE[array.dtype] <= LIMIT
    assert array.data.format == "B"
    return array


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_is_read_and_one_cut_short_anywhere_is_refused(name: str) -> None:
    payload = FILES[name]
    assert outcome(payload) is not None
    for length in {*range(0, len(payload), 7), len(payload) - 1}:
        assert outcome(payload[:length]) is None, length


@pytest.mark.parametrize("name", FILES)
def test_bytes_behind_a_file_are_refused(name: str) -> None:
    assert outcome(FILES[name] + b"\0") is None


@seed(7)
@settings(max_examples=200, deadline=None, database=None)
@given(name=st.sampled_from(list(FILES)), data=st.data())
def test_flipped_bits_give_an_error_or_a_sound_array(name: str, data: st.DataObject) -> None:
    payload = bytearray(FILES[name])
    places = st.integers(0, len(payload) * 8 - 1)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        payload[place // 8] ^= 1 << place % 8
    outcome(bytes(payload))


@pytest.mark.parametrize("name", FILES)
def test_every_header_byte_set_to_its_extremes_gives_an_error_or_a_sound_array(name: str) -> None:
    for at in range(0, len(FILES[name]), 3):
        for value in (0x00, 0xFF):
            payload = bytearray(FILES[name])
            payload[at] = value
            outcome(bytes(payload))


@seed(7)
@settings(max_examples=200, deadline=None, database=None)
@given(name=st.sampled_from(list(FILES)), cut=st.integers(0, 400), tail=st.binary(max_size=200))
def test_a_true_start_with_a_random_tail_is_refused(name: str, cut: int, tail: bytes) -> None:
    outcome(FILES[name][:cut] + tail)


def described_soundly(text: bytes) -> None:
    try:
        tensor = read_description(text)
    except ContainerError:
        return
    assert len(tensor.shape) == len(tensor.strides)
    assert all(0 <= n < 2**63 for n in (*tensor.shape, *tensor.strides, tensor.offset))


@seed(7)
@settings(max_examples=200, deadline=None, database=None)
@given(text=st.binary(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join))
@example(b"\x80\x02" + b"(" * 200 + b"t" * 200 + b".")
@example(b"\x80\x02)" + b"q\0h\0\x86" * 60 + b"R.")  # a tuple of 2**60 leaves
@example(b"\x80\x02)" + b"q\0h\0\x86" * 60 + b"Q.")
def test_any_pickle_gives_an_error_or_a_description(text: bytes) -> None:
    described_soundly(text)


@pytest.mark.parametrize("text", DESCRIPTIONS)
def test_every_changed_byte_of_a_description_gives_an_error_or_a_description(text: bytes) -> None:
    for at in range(len(text)):
        for value in (*b".(tQRqhJX\x00\x86\x8a\xff", text[at] ^ 1):
            described_soundly(text[:at] + bytes([value]) + text[at + 1 :])


@seed(7)
@settings(max_examples=200, deadline=None, database=None)
@given(text=st.text(max_size=40) | st.text("QUJD+/-_=%2Bb \r\n", max_size=40))
def test_any_text_is_base64_or_a_container_error(text: str) -> None:
    try:
        assert 1 <= len(decode_base64(text, limit_bytes=20)) <= 20
    except ContainerError as error:
        check_message(error)


# The inputs of the long runs, a few of each kind


@pytest.mark.parametrize("name", containers.TARGETS)
def test_hostile_inputs_of_each_kind_end_well(name: str) -> None:
    tally = containers.Tally()
    for number in range(150):
        payload = containers.made(name, 7, number)
        containers.try_one(containers.TARGETS[name], payload, tally, measured=number % 8 == 0)
    assert tally.read + tally.refused == 150
    assert tally.refused > 0


# What cost a reader most time or memory for its size in the long runs, written small


def _safetensors_of(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def _npy_of(header: str, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\2\0" + struct.pack("<I", len(header)) + header.encode() + body


def _archive_of(directory: bytes, count: int) -> bytes:
    start = b"PK\3\4".ljust(30, b"\0")
    numbers = (0, 0, count, count, len(directory), len(start), 0)
    return start + directory + struct.pack("<4sHHHHIIH", b"PK\5\6", *numbers)


NASTY = {
    "JSON nested as deep as the header allows": _safetensors_of(b'{"x":' + b"[" * 260_000),
    "objects nested as deep as the header allows": _safetensors_of(b'{"x":' * 50_000),
    "a number of many digits": _safetensors_of(b'{"x":' + b"9" * 200_000 + b"}"),
    "very many names": _safetensors_of(
        b"{" + b",".join(b'"%d":0' % n for n in range(26_000)) + b"}"
    ),
    "a name as long as the header allows": _safetensors_of(b'{"' + b"y" * 260_000 + b'":{}}'),
    "an escape for each character": _safetensors_of(b'{"' + b"\\u00e9" * 40_000 + b'":{}}'),
    "a length of 64 bits": b"\xff" * 8 + b"{",
    "a header that nearly matches everywhere": _npy_of("{" + "'shape': (1, " * 700 + "}"),
    "blanks between the items": _npy_of("{'descr':" + " " * 9_900 + "}"),
    "quotes without end": _npy_of("{" + "'" * 9_900 + "}"),
    "a shape of many extents": _npy_of(
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1,' * 4_000}), }}", bytes(4)
    ),
    "one element told as very many": _torch_file(torch.ones(1).expand(2**20, 2**20)),
    "a view that steps over its storage": _torch_file(TENSOR.as_strided((5, 6), (0, 0))),
    "a directory of a thousand records without a name": _archive_of(
        b"PK\1\2".ljust(46, b"\0") * 1024, 1024
    ),
}


@pytest.mark.parametrize("payload", NASTY.values(), ids=NASTY)
def test_the_nastiest_inputs_take_little_time_and_memory(payload: bytes) -> None:
    tracemalloc.start()
    began = time.thread_time()
    try:
        read_embedding(payload, limit_bytes=LIMIT)
    except ContainerError as error:
        check_message(error)
    finally:
        spent = time.thread_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert spent < 1
    assert peak < LIMIT + 3 * len(payload) + containers.SLACK_BYTES
