"""The tensor codec for torch: `chiasm.tensors.Array` to and from `torch.Tensor`.

Apart from `chiasm.tensors`, so that the gateway and clients never load torch.
"""

from collections.abc import Mapping

import numpy as np
import torch

from chiasm.errors import ChiasmError, Reason
from chiasm.tensors import BY_NAME, Array
from chiasm.wire import as_bytes_view

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(name: str) -> torch.dtype:
    """The torch type of a wire type's name."""
    return _DTYPES[name]


def name_of(dtype: torch.dtype) -> str:
    """The wire name of a torch type; raises TENSOR_INVALID if it has none."""
    if dtype not in _NAMES:
        raise ChiasmError(Reason.TENSOR_INVALID, "This torch type has no wire form; use float32.")
    return _NAMES[dtype]


def from_torch(tensor: torch.Tensor) -> Array:
    """An Array over the memory of a CPU tensor; copies only to make it dense and contiguous."""
    kind = BY_NAME[name_of(tensor.dtype)]
    dense = tensor.detach().cpu().contiguous()
    flat = dense.view(torch.uint8) if dense.dim() else dense.reshape(1).view(torch.uint8)
    return Array(kind, tuple(dense.shape), as_bytes_view(flat.numpy()))


def to_torch(array: Array) -> torch.Tensor:
    """A tensor over the Array's own bytes, without a copy.

    The bytes that gRPC hands out are immutable: treat the tensor as read-only, or clone it.
    """
    flat = torch.from_numpy(np.asarray(_Exposed(array.data)))
    return flat.view(_DTYPES[array.data_type.name]).reshape(array.shape)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Reads each once and allocates nothing.

    The extremes tell: they are NaN if any element is, and infinite if any is. `isfinite` makes a
    tensor of flags first and is 10 to 50 times slower.
    """
    if not tensor.numel():
        return True
    least, greatest = torch.aminmax(tensor)
    return bool(torch.isfinite(least)) and bool(torch.isfinite(greatest))


class _Exposed:
    """Bytes as numpy takes them, marked writable: torch warns about memory that is not."""

    def __init__(self, data: memoryview) -> None:
        self._owner = np.frombuffer(data, np.uint8)
        interface = dict(self._owner.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
