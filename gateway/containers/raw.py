"""Raw elements beside their type and shape: this interface's own form, for any language.

{"data": base64 of little-endian row-major elements, "dtype": "float32", "shape": [rows, width]}
"""

from typing import Any, Final

import numpy as np

from gateway.containers.array import (
    MAX_RANK,
    ContainerError,
    EmbeddingArray,
    Wanted,
    check_dtype,
    check_length,
    check_shape,
    element_type,
    pack,
)

_LARGEST: Final = 2**63 - 1


def read_raw(
    data: bytes | memoryview, dtype: str, shape: tuple[int, ...], wanted: Wanted
) -> EmbeddingArray:
    """The array of those bytes, with type and shape checked. Raises `ContainerError`."""
    check_length("raw", dtype, shape, len(data), wanted)
    elements: np.ndarray[Any, Any] = np.ndarray(
        shape, dtype=element_type(dtype, "little"), buffer=data
    )
    return pack("raw", dtype, elements, wanted)


def raw_dtype(dtype: object, wanted: Wanted) -> str:
    """`dtype` as it came, checked. Raises `ContainerError`."""
    if not isinstance(dtype, str):
        text = f'{wanted.what} needs its element type under dtype, for instance "float32"'
        raise ContainerError("raw", text)
    check_dtype("raw", dtype, dtype, wanted)
    return dtype


def raw_shape(shape: object, dtype: str, wanted: Wanted) -> tuple[int, ...]:
    """`shape` as it came, checked for an array of `dtype`. Raises `ContainerError`."""
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        text = f"its shape must be a list of at most {MAX_RANK} whole numbers, for instance"
        raise ContainerError("raw", f"{text} [576, 4096]")
    if not all(type(size) is int and 0 <= size <= _LARGEST for size in shape):
        raise ContainerError("raw", "its shape has an entry that is no size; send whole numbers")
    check_shape("raw", dtype, shape, wanted)
    return tuple(shape)
