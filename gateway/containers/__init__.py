"""Embeddings that clients send: `torch.save`, `.npy` and safetensors files, told by content.

Beside them raw elements with their type and shape, for clients without such a library.

The readers are strict and need NumPy only. They load no pickle, build no object that the input
names, and compare every size with the limit and with the bytes at hand before they allocate.
A little-endian row-major array becomes a view of the payload; others are copied once.
"""

from typing import Final

from gateway.containers.array import (
    Container,
    ContainerError,
    ContainerTooLarge,
    EmbeddingArray,
    Wanted,
    embedding,
    integers,
)
from gateway.containers.base64_text import decode_base64
from gateway.containers.npy import MAGIC as _NPY_MAGIC
from gateway.containers.npy import read_npy
from gateway.containers.raw import raw_dtype, raw_shape, read_raw
from gateway.containers.safetensors_file import looks_like_safetensors, read_safetensors
from gateway.containers.torch_pickle import refusal as _torch_refusal
from gateway.containers.torch_zip import LEGACY_MAGIC as _TORCH_LEGACY_MAGIC
from gateway.containers.torch_zip import read_torch
from gateway.containers.zip_records import MAGIC as _ZIP_MAGIC

__all__ = [
    "Container",
    "ContainerError",
    "ContainerTooLarge",
    "EmbeddingArray",
    "Wanted",
    "decode_base64",
    "embedding",
    "integers",
    "raw_dtype",
    "raw_shape",
    "read_array",
    "read_embedding",
    "read_raw",
]

_LONGEST_MAGIC: Final = len(_TORCH_LEGACY_MAGIC)
_FORMS: Final = "send a file of torch.save, numpy.save or safetensors that holds one tensor"
_FOREIGN: Final = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"RIFF": "a WebP image",
    b"\x1f\x8b": "gzip data",
    b"\x89HDF": "an HDF5 file",
    b"PK\x05\x06": "an empty zip archive",
    b"[": "JSON text",
    b"{": "JSON text",
}


def read_embedding(payload: bytes | memoryview, *, limit_bytes: int) -> EmbeddingArray:
    """The floating tensor in `payload` (contiguous bytes), at most `limit_bytes` as an array.

    Raises `ContainerTooLarge` where the array exceeds the limit, `ContainerError` for all else.
    """
    return read_array(payload, embedding(limit_bytes))


def read_array(payload: bytes | memoryview, wanted: Wanted) -> EmbeddingArray:
    """The one tensor in `payload` (contiguous bytes), as `wanted` says.

    Raises `ContainerTooLarge` where the array exceeds the limit, `ContainerError` for all else.
    """
    view = memoryview(payload).cast("B")
    start = bytes(view[:_LONGEST_MAGIC])
    if start.startswith(_ZIP_MAGIC):
        return read_torch(view, wanted)
    if start.startswith(_NPY_MAGIC):
        return read_npy(view, wanted)
    if looks_like_safetensors(view):
        return read_safetensors(view, wanted)
    raise _unknown(start, wanted.what)


def _unknown(start: bytes, what: str) -> ContainerError:
    if not start:
        return ContainerError("unknown", f"{what} holds 0 bytes; {_FORMS}")
    if start.startswith(_TORCH_LEGACY_MAGIC):
        return _torch_refusal("the format before PyTorch 1.6, which is not zip")
    if start.startswith(b"\x80"):
        return ContainerError("unknown", f"{what} is a bare pickle, never loaded; {_FORMS}")
    for magic, found in _FOREIGN.items():
        if start.startswith(magic):
            return ContainerError("unknown", f"{what} is {found}; {_FORMS}")
    return ContainerError("unknown", f"{what}'s format is not known; {_FORMS}")
