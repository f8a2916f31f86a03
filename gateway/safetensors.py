"""Safetensors bodies of several embeddings: written by us, and read from whoever sends one.

Format: the README of huggingface/safetensors, section "Format". A tensor's name is its number; what
is known of it is JSON text under the same name in `__metadata__`, so that a body of ours can be
sent back as it is. Nothing in a body is believed: offsets, types and sizes are checked here, rows,
identity and values by the LLM service.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from chiasm.tensors import Array
from gateway.containers import ContainerError, EmbeddingArray, embedding
from gateway.containers.array import check_dtype, check_length, check_shape, element_type, pack
from gateway.containers.safetensors_file import DTYPES, fields_of, split_file

MEDIA_TYPE: Final = "application/x-safetensors"
_NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MOST_TEXT: Final = 16 << 10  # characters of what is said of one tensor


@dataclass(frozen=True)
class StoredEmbedding:
    """One tensor of a body, its name, and what the body says of it: claims."""

    name: str
    array: EmbeddingArray
    told: Mapping[str, Any]


def write_safetensors(arrays: Sequence[Array], told: Sequence[Mapping[str, Any]]) -> bytes:
    """A body of `arrays` under the names `0`, `1` and so on, and what is `told` of each."""
    header: dict[str, Any] = {
        "__metadata__": {str(i): json.dumps(one) for i, one in enumerate(told)} | {"format": "pt"}
    }
    offset = 0
    for number, array in enumerate(arrays):
        end = offset + array.data.nbytes
        header[str(number)] = {
            "dtype": _NAMES[array.data_type.name],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *(array.data for array in arrays)))


def read_safetensors_items(body: memoryview, limit_bytes: int) -> list[StoredEmbedding]:
    """The embeddings of a body, in the order of their bytes, each of at most `limit_bytes`.

    Raises ContainerError, or ContainerTooLarge.
    """
    header, data = split_file(body)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ContainerError("safetensors", "the file's __metadata__ does not map text to text")
    if not header:
        raise ContainerError("safetensors", "the file holds no tensor; send one for each picture")
    described = sorted(
        ((name, *fields_of(tensor)) for name, tensor in header.items()), key=lambda one: one[3]
    )
    items, reached = [], 0
    for name, found, shape, (begin, end) in described:
        if begin != reached or not begin <= end <= len(data):
            text = f"the file has data_offsets [{begin}, {end}] where [{reached}, ...] is due"
            raise ContainerError("safetensors", text)
        array = _array(found, shape, data[begin:end], limit_bytes)
        items.append(StoredEmbedding(name, array, _told(metadata.get(name))))
        reached = end
    if reached != len(data):
        text = f"the file's body has {len(data)} bytes, its tensors take {reached}"
        raise ContainerError("safetensors", text)
    return items


def _array(
    found: str, shape: tuple[int, ...], data: memoryview, limit_bytes: int
) -> EmbeddingArray:
    wanted = embedding(limit_bytes)
    dtype = DTYPES.get(found, "")
    check_dtype("safetensors", dtype, found, wanted)
    check_shape("safetensors", dtype, shape, wanted)
    check_length("safetensors", dtype, shape, len(data), wanted)
    elements = np.ndarray(shape, dtype=element_type(dtype, "little"), buffer=data)
    return pack("safetensors", dtype, elements, wanted)


def _told(text: Any) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        if not isinstance(text, str) or len(text) > _MOST_TEXT:
            raise ValueError
        told = json.loads(text)
        if not isinstance(told, dict):
            raise ValueError
    except (ValueError, RecursionError):
        fault = "the file's __metadata__ says something of a tensor that is no JSON object"
        raise ContainerError("safetensors", fault) from None
    return told
