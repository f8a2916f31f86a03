"""The tensor codec for numpy: `chiasm.v1.Tensor` to and from arrays, in every wire type.

numpy has no bfloat16. Such an array is held as uint16 bit patterns beside the type's name; see
`Array`. The torch side is `chiasm.torch_tensors`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import tensor_pb2
from chiasm.wire import Buffer, Buffers, as_bytes_view

MAX_RANK = 8
# Shapes are int64 on the wire; a byte count beyond this is refused before any arithmetic on memory.
_MAX_BYTES = 1 << 40


@dataclass(frozen=True)
class DataType:
    """One element type: its name, its number on the wire, its size and its numpy stand-in."""

    name: str
    wire: "tensor_pb2.DataType.ValueType"
    item_bytes: int
    storage: "np.dtype[Any]"
    floating: bool


_TYPES = (
    DataType("float32", tensor_pb2.DATA_TYPE_FLOAT32, 4, np.dtype("<f4"), True),
    DataType("float16", tensor_pb2.DATA_TYPE_FLOAT16, 2, np.dtype("<f2"), True),
    DataType("bfloat16", tensor_pb2.DATA_TYPE_BFLOAT16, 2, np.dtype("<u2"), True),
    DataType("int64", tensor_pb2.DATA_TYPE_INT64, 8, np.dtype("<i8"), False),
    DataType("int32", tensor_pb2.DATA_TYPE_INT32, 4, np.dtype("<i4"), False),
    DataType("uint8", tensor_pb2.DATA_TYPE_UINT8, 1, np.dtype("u1"), False),
)
BY_NAME: Mapping[str, DataType] = {kind.name: kind for kind in _TYPES}
BY_WIRE: Mapping[int, DataType] = {kind.wire: kind for kind in _TYPES}


@dataclass(frozen=True)
class Array:
    """A dense row-major tensor: `data` holds little-endian bytes, `shape` outermost first."""

    data_type: DataType
    shape: tuple[int, ...]
    data: memoryview

    @property
    def storage(self) -> npt.NDArray[Any]:
        """The elements without a copy, read-only as the bytes are; bfloat16 as uint16 patterns."""
        return np.frombuffer(self.data, self.data_type.storage).reshape(self.shape)

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The values as float32. Exact for every floating type; a copy unless float32 already."""
        if self.data_type.name == "bfloat16":
            return (self.storage.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return self.storage.astype(np.float32, copy=False)


def from_numpy(array: npt.NDArray[Any], name: str | None = None) -> Array:
    """An Array over `array`'s memory; copies only to make it contiguous and little-endian.

    `name` overrides the type's name: "bfloat16" for uint16 bit patterns. Raises TENSOR_INVALID for
    a type that has no wire form.
    """
    kind = BY_NAME.get(name or array.dtype.name)
    if kind is None:
        raise _invalid(f"The type {array.dtype.name} has no wire form; cast to float32.")
    if kind.storage.itemsize != array.dtype.itemsize:
        raise _invalid(f"{kind.name} takes {kind.storage.itemsize} bytes an element.")
    array = np.asarray(array, order="C")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Array(kind, array.shape, as_bytes_view(array))


def to_wire(array: Array, buffers: Buffers) -> tensor_pb2.Tensor:
    """The message of `array`; its bytes join `buffers` without a copy."""
    return tensor_pb2.Tensor(
        data_type=array.data_type.wire, shape=array.shape, data=buffers.put(array.data)
    )


def describe(array: Array) -> tensor_pb2.Tensor:
    """The message of `array` without its bytes."""
    return tensor_pb2.Tensor(data_type=array.data_type.wire, shape=array.shape)


def from_wire(tensor: tensor_pb2.Tensor, data: Buffer) -> Array:
    """The Array of a received tensor, over `data` itself.

    Raises TENSOR_INVALID, before anything is allocated, unless the type is known, the shape has one
    to eight dimensions of at least 1, and `data` has exactly the bytes that they need.
    """
    kind, shape = checked_form(tensor)
    needed = prod(shape) * kind.item_bytes
    view = memoryview(data)
    if view.nbytes != needed:
        raise _invalid(
            f"The shape {list(shape)} of {kind.name} needs {needed} bytes, but {view.nbytes} came.",
            "data",
        )
    return Array(kind, shape, view)


def checked_form(tensor: tensor_pb2.Tensor) -> tuple[DataType, tuple[int, ...]]:
    """Type and shape of a received tensor; raises TENSOR_INVALID as `from_wire` does."""
    kind = BY_WIRE.get(tensor.data_type)
    if kind is None:
        names = ", ".join(sorted(BY_NAME))
        raise _invalid(f"Unknown data type {tensor.data_type}; use one of {names}.", "data_type")
    rank = len(tensor.shape)
    if not 1 <= rank <= MAX_RANK:
        raise _invalid(f"A tensor has 1 to {MAX_RANK} dimensions, but {rank} came.", "shape")
    shape = tuple(tensor.shape)
    if min(shape) < 1:
        raise _invalid(f"Every dimension is at least 1, but the shape is {list(shape)}.", "shape")
    # Python integers do not overflow, so the product is the true one.
    if prod(shape) * kind.item_bytes > _MAX_BYTES:
        raise _invalid(f"The shape {list(shape)} is larger than any tensor served here.", "shape")
    return kind, shape


def _invalid(message: str, place: str | None = None) -> ChiasmError:
    return ChiasmError(Reason.TENSOR_INVALID, message, place)
