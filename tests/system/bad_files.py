"""Files that no service may accept: pictures that are none, tensors that lie, pickles that act."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.system.three import noise

ODD_IMAGES = Path(__file__).parents[1] / "odd_images"
TEXT = b"Hello World, I am no picture."


def truncated_jpeg() -> bytes:
    """A JPEG without its last bytes."""
    return (ODD_IMAGES / "truncated_jpeg.jpg").read_bytes()


def truncated_png() -> bytes:
    """Half of a PNG: its header is whole."""
    whole = noise(1)
    return whole[: len(whole) // 2]


def bomb() -> bytes:
    """A PNG of 60 bytes whose header says 30,000 by 30,000 pixels."""
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"") + _chunk(b"IEND")


def npy(descr: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """A `.npy` file whose header says what it is told to."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def safetensors_file(dtype: str, shape: list[int], data: bytes, end: int | None = None) -> bytes:
    """A safetensors file whose header says what it is told to."""
    entry = {
        "dtype": dtype, "shape": shape, "data_offsets": [0, len(data) if end is None else end],
    }  # fmt: skip
    header = json.dumps({"image_embeds": entry}).encode()
    return struct.pack("<Q", len(header)) + header + data


def torch_file(value: Any) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def sparse(shape: tuple[int, int]) -> torch.Tensor:
    """A sparse tensor with one element."""
    place, value = torch.tensor([[0], [0]]), torch.tensor([1.0])
    return torch.sparse_coo_tensor(place, value, shape, check_invariants=True)


class Act:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return open, (self._marker, "w")


def object_npy(marker: Path) -> bytes:
    """A `.npy` file of pickled objects."""
    file = io.BytesIO()
    np.save(file, np.array([[Act(marker)]], dtype=object), allow_pickle=True)
    return file.getvalue()


def _chunk(kind: bytes, data: bytes = b"") -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check
