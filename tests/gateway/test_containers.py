"""`.npy`, safetensors and base64, and how containers are told apart."""

import ast
import base64
import io
import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import gateway.containers
from gateway.containers import (
    ContainerError,
    ContainerTooLarge,
    EmbeddingArray,
    decode_base64,
    read_embedding,
)

LIMIT = 2**20
RANDOM = np.random.default_rng(7)
VALUES = RANDOM.standard_normal((3, 4, 5))


def saved_npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy(header: str, body: bytes = bytes(48), version: bytes = b"\1\0") -> bytes:
    width = 2 if version == b"\1\0" else 4
    return b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header.encode() + body


def safetensors_file(header: object, body: bytes = bytes(48)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def one_tensor(**changes: object) -> Mapping[str, object]:
    fields = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48], **changes}
    return {"image_embeds": {k: v for k, v in fields.items() if v is not ...}}


def read(payload: bytes) -> EmbeddingArray:
    return read_embedding(payload, limit_bytes=LIMIT)


def refused(payload: bytes, *words: str) -> ContainerError:
    tracemalloc.start()
    with pytest.raises(ContainerError) as caught:
        read(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    for word in words:
        assert word in caught.value.message
    return caught.value


# Telling apart


def test_all_containers_of_one_tensor_give_one_array() -> None:
    tensor = torch.from_numpy(VALUES.astype(np.float32))
    file = io.BytesIO()
    torch.save(tensor, file)
    files = [
        file.getvalue(),
        saved_npy(tensor.numpy()),
        safetensors.torch.save({"image_embeds": tensor}),
    ]
    arrays = [read(payload) for payload in files]
    assert all(a.dtype == "float32" and a.shape == (3, 4, 5) for a in arrays)
    assert {bytes(a.data) for a in arrays} == {tensor.numpy().tobytes()}


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        (b"", "0 bytes"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "a PNG image"),
        (b"\xff\xd8\xff\xe0" + bytes(40), "a JPEG image"),
        (b"\x80\x04\x95\x00.", "a bare pickle"),
        (b"[[0.5, 0.25]]", "JSON text"),
        (b"PK\x05\x06" + bytes(18), "an empty zip archive"),
        (bytes(48), "not known"),
        (np.ones((3, 4), np.float32).tobytes(), "not known"),
    ],
)
def test_bytes_of_no_container_are_refused_by_name(payload: bytes, found: str) -> None:
    assert refused(payload, found, "torch.save").container == "unknown"


def test_any_contiguous_buffer_is_read() -> None:
    payload = saved_npy(np.ones((2, 3), np.float32))
    for buffer in (memoryview(payload), memoryview(bytearray(b"xx" + payload))[2:]):
        assert read_embedding(buffer, limit_bytes=LIMIT).shape == (2, 3)


def test_reading_loads_neither_torch_nor_an_unpickler() -> None:
    folder = Path(gateway.containers.__file__).parent
    allowed = {"binascii", "collections", "dataclasses", "enum", "gateway", "json", "math"}
    allowed |= {"numpy", "pybase64", "re", "struct", "typing"}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path.name
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed, path.name
    code = "import sys, gateway.containers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=folder.parents[1]).returncode == 0


# .npy


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f2", ">f2", "<f8", ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_arrays_of_either_endianness_and_order_are_read(kind: str, order: str) -> None:
    array = np.asarray(VALUES, dtype=kind, order=order)  # type: ignore[call-overload]
    result = read(saved_npy(array))
    expected = array.astype("<f2" if kind[1:] == "f2" else "<f4")
    assert result.dtype == expected.dtype.name
    assert result.shape == (3, 4, 5)
    assert bytes(result.data) == expected.tobytes("C")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_versions_1_to_3_are_read(version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, VALUES.astype("<f4"), version=version)
    assert read(file.getvalue()).shape == (3, 4, 5)


def test_a_contiguous_npy_becomes_a_view_of_the_payload() -> None:
    payload = saved_npy(np.ones((256, 1024), np.float32))
    for buffer in (payload, memoryview(b"x" + payload)[1:]):  # aligned or not
        tracemalloc.start()
        array = read_embedding(buffer, limit_bytes=LIMIT)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert array.data.nbytes == 2**20
        assert array.data.readonly
        assert peak < 2**16


def test_npy_headers_of_other_writers_are_read() -> None:
    for header in (
        "{'descr':'<f4','fortran_order':False,'shape':(3,4)}",
        '{"shape": (3, 4,), "fortran_order": False, "descr": "<f4"}\n',
        "  { 'fortran_order' : False , 'descr' : '<f4', 'shape' : ( 3 , 4 ), }   \n",
    ):
        assert read(npy(header)).shape == (3, 4)
    assert read(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (12,), }")).shape == (12,)


def test_npy_objects_are_refused_and_not_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.mkdir, (tmp_path / "it ran",)

    refused(saved_npy(np.array([Bomb()], dtype=object)), "pickled objects")
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.ones((2, 3), np.int64), "<i8"),
        (np.ones((2, 3), np.int8), "|i1"),
        (np.ones((2, 3), np.bool_), "|b1"),
        (np.ones((2, 3), np.complex64), "<c8"),
        (np.ones((2, 3), np.dtype("V2")), "bfloat16"),
        (np.array(["text"]), "<U4"),
        (np.ones(2, [("x", "<f4")]), "structured"),
        (np.ones((), np.float32), "scalar"),
        (np.ones((0, 4), np.float32), "empty"),
        (np.ones((1,) * 5, np.float32), "5 axes"),
        (np.array([1e39]), "float32's range"),
    ],
)
def test_other_npy_arrays_are_refused_by_name(array: np.ndarray[Any, Any], found: str) -> None:
    assert refused(saved_npy(array), found).container == "npy"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5), }", "60 bytes, and 48 follow"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 3), }", "36 bytes, and 48 follow"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (12), }", "not understood"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-3, -4), }", "not understood"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4L), }", "not understood"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (,), }", "not understood"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,,4), }", "not understood"),
        (
            f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 20},), }}",
            "not understood",
        ),
        ("{'descr': '<f4', 'fortran_order': 0, 'shape': (3, 4), }", "not understood"),
        ("{'descr': '<f4', 'fortran_order': 'True', 'shape': (3, 4), }", "not understood"),
        ("{'descr': False, 'fortran_order': False, 'shape': (3, 4), }", "not understood"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': '34', }", "not understood"),
        ("{'descr': '<f4', 'fortran_order': False}", "not understood"),
        ("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (12,)}", "understood"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (12,), 'x': 1}", "not understood"),
        ("{'descr': '', 'fortran_order': False, 'shape': (12,)}", "element type is ;"),
        ("__import__('os').mkdir('x')", "not understood"),
        ("(" * 9000, "not understood"),
        ("{" + " " * 9000 + "'" * 900 + "}", "not understood"),
        ("", "not understood"),
        ("{'descr': '<f4é', }", "outside ASCII"),
        (" " * 10_001, "header takes 10001 bytes"),
    ],
)
def test_npy_headers_that_lie_or_are_odd_are_refused(header: str, found: str) -> None:
    body = header.encode()
    payload = b"\x93NUMPY\2\0" + struct.pack("<I", len(body)) + body + bytes(48)
    assert refused(payload, found).container == "npy"


@pytest.mark.parametrize("version", [b"\0\0", b"\1\1", b"\4\0", b""])
def test_other_npy_versions_are_refused(version: bytes) -> None:
    refused(b"\x93NUMPY" + version, "version")


@pytest.mark.parametrize("shape", ["1048576, 1048576", f"{2**62}, {2**62}", "512, 513"])
def test_an_npy_size_beyond_the_limit_is_told_from_the_header(shape: str) -> None:
    error = refused(npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}"))
    assert isinstance(error, ContainerTooLarge)


# safetensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_safetensors_of_one_tensor_of_any_name_are_read(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(VALUES).to(dtype)
    array = read(safetensors.torch.save({"x é": tensor}, metadata={"made by": "a test"}))
    expected = tensor.float() if dtype is torch.float64 else tensor
    assert f"torch.{array.dtype}" == str(expected.dtype)
    assert array.shape == (3, 4, 5)
    assert bytes(array.data) == expected.view(torch.uint8).numpy().tobytes()


def test_safetensors_of_several_tensors_are_refused_by_their_names() -> None:
    tensors = {f"t{i}": torch.ones(2, 3) for i in range(12)}
    refused(safetensors.torch.save(tensors), "12 tensors", "t0, t1", "...")
    pair = {"image_embeds": torch.ones(2, 3), "grid": torch.ones(1, 3, dtype=torch.int64)}
    refused(safetensors.torch.save(pair), "2 tensors", "image_embeds", "grid")
    refused(safetensors.torch.save({}), "no tensor")


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (one_tensor(dtype="I64"), "I64"),
        (one_tensor(dtype="F8_E4M3"), "F8_E4M3"),
        (one_tensor(dtype=["F32"]), "not text"),
        (one_tensor(dtype=...), "other fields"),
        (one_tensor(extra=1), "other fields"),
        (one_tensor(shape=[3, 5]), "60 bytes, and 48 follow"),
        (one_tensor(shape=[]), "scalar"),
        (one_tensor(shape=[0, 4]), "empty"),
        (one_tensor(shape=[1, 1, 1, 1, 12]), "5 axes"),
        (one_tensor(shape=[3.0, 4]), "no size"),
        (one_tensor(shape=[True, 12]), "no size"),
        (one_tensor(shape=[-3, -4]), "no size"),
        (one_tensor(shape=[2**64]), "no size"),
        (one_tensor(shape="34"), "not a list"),
        (one_tensor(data_offsets=[4, 52]), "data_offsets [4, 52]"),
        (one_tensor(data_offsets=[0, 44]), "data_offsets [0, 44]"),
        (one_tensor(data_offsets=[0]), "not a pair"),
        ({"x": [1]}, "other fields"),
        ({"__metadata__": 1, **one_tensor()}, "__metadata__"),
        ({"__metadata__": {"x": 1}, **one_tensor()}, "__metadata__"),
        (b'{"x": 1, "x": 2}', "twice"),
        (b'{"x": NaN}', "not JSON"),
        (b'{"x": ' + b"[" * 100_000, "not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"x": "\xff"}', "not JSON"),
        (b"{", "not JSON"),
        (b"{}", "no tensor"),
    ],
)
def test_safetensors_headers_that_lie_or_are_odd_are_refused(header: object, found: str) -> None:
    payload = safetensors_file(header)
    with pytest.raises(ContainerError) as caught:
        read(payload)
    assert found in caught.value.message
    assert caught.value.container == "safetensors"


@pytest.mark.parametrize("length", [2**18 + 1, 2**63, 2**64 - 1, 4000])
def test_a_safetensors_header_longer_than_allowed_or_given_is_refused(length: int) -> None:
    refused(struct.pack("<Q", length) + b"{}" + bytes(48), f"takes {length} bytes")


@pytest.mark.parametrize("shape", [[2**20, 2**20], [2**62, 2**62], [512, 513]])
def test_a_safetensors_size_beyond_the_limit_is_told_from_the_header(shape: list[int]) -> None:
    assert isinstance(refused(safetensors_file(one_tensor(shape=shape))), ContainerTooLarge)


def test_names_in_messages_are_short_and_printable() -> None:
    names = {"\ud800\x00\x1b[31m" + "n" * 5000: 1, "é" * 99: 2}
    message = refused(safetensors_file(names)).message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 300


# base64


DATA = bytes(RANDOM.integers(0, 256, 1000, dtype=np.uint8)) + b"\xfb\xff\xfe"


def _wrapped(text: str) -> str:
    return "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76))


def test_base64_is_read_as_people_send_it() -> None:
    for data in (DATA, DATA[:-1], DATA[:-2]):
        tidy = base64.b64encode(data).decode()
        escaped = tidy.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
        url_safe = base64.urlsafe_b64encode(data).decode().rstrip("=")
        for text in (tidy, tidy.rstrip("="), _wrapped(tidy), f" {tidy}\n", escaped, url_safe):
            assert decode_base64(text, limit_bytes=len(data)) == data


@pytest.mark.parametrize(
    "text",
    ["!!!!", "QUJ*", "QUJDR", "Q", "QQ==QQ==", "QUé=", "QUJD\0", "%41%42", "%", "data:;base64,QQ"],
)
def test_other_base64_is_refused(text: str) -> None:
    with pytest.raises(ContainerError) as caught:
        decode_base64(text, limit_bytes=100)
    assert caught.value.container == "base64"
    assert "base64" in caught.value.message
    assert text not in caught.value.message


@pytest.mark.parametrize("text", ["", " \n", "====", "="])
def test_base64_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ContainerError, match="0 bytes"):
        decode_base64(text, limit_bytes=100)


def test_base64_beyond_the_limit_is_refused_before_decoding() -> None:
    for data in (bytes(100), bytes(101), bytes(102)):
        text = base64.b64encode(data).decode()
        for form in (text, _wrapped(text), text.rstrip("=")):
            assert decode_base64(form, limit_bytes=len(data)) == data
            with pytest.raises(ContainerTooLarge):
                decode_base64(form, limit_bytes=len(data) - 1)
    text = "A" * 2**22
    tracemalloc.start()
    with pytest.raises(ContainerTooLarge):
        decode_base64(text, limit_bytes=2**20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**16


def test_a_flood_of_percent_escapes_is_refused() -> None:
    with pytest.raises(ContainerError, match="percent"):
        decode_base64("%2B" * 100_000, limit_bytes=2**20)
