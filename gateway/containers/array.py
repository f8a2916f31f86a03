"""What every container becomes, and the one place that decides what is taken.

Kept as they are: float32, float16, bfloat16. float64 is rounded to float32, and refused where a
finite value would become infinite. Everything else is refused. NaN, infinities and the meaning of
the axes are the caller's to judge.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Container: TypeAlias = Literal["torch", "npy", "safetensors", "base64", "unknown"]
Order: TypeAlias = Literal["little", "big"]

MAX_RANK: Final = 4
ACCEPTED: Final = "float32, float16, bfloat16 or float64"
_RESULT: Final = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float32",
}
# NumPy has no bfloat16; its two bytes are moved about as an unsigned integer.
_CODE: Final = {"float32": "f4", "float16": "f2", "bfloat16": "u2", "float64": "f8"}
_MOST_SHOWN: Final = 48  # characters of a name that came with the input


class ContainerError(ValueError):
    """Bytes that hold no embedding. `message` is safe for the wire: of the input it repeats
    numbers and short printable names only."""

    def __init__(self, container: Container, message: str) -> None:
        super().__init__(message)
        self.container: Final[Container] = container
        self.message: Final[str] = message


class ContainerTooLarge(ContainerError):
    """The embedding is, or says it is, larger than the limit; nothing was allocated for it."""


@dataclass(frozen=True, slots=True)
class EmbeddingArray:
    """One dense tensor.

    `dtype`: float32, float16 or bfloat16. `shape`: 1 to 4 axes, each 1 or more. `data`: read-only
    little-endian bytes in row-major order; a view of the input wherever that already was so.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def printable(text: str) -> str:
    """`text` as a short name that is safe to repeat to the sender."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_MOST_SHOWN])
    return shown if len(text) <= _MOST_SHOWN else f"{shown}..."


def item_size(dtype: str) -> int:
    """Bytes of one element as it lies in the container."""
    return int(_CODE[dtype][1])


def check_shape(
    container: Container, dtype: str, shape: Sequence[int], *, limit_bytes: int
) -> None:
    """Raises `ContainerError` unless an array of `dtype` and `shape` may be built.

    Python integers do not overflow, so the product is exact whatever the container claims.
    """
    if not shape:
        raise ContainerError(container, "the embedding is a scalar; send one row for each token")
    if len(shape) > MAX_RANK:
        text = f"the embedding has {len(shape)} axes; send at most {MAX_RANK}"
        raise ContainerError(container, text)
    if 0 in shape:
        text = f"the embedding of shape {list(shape)} is empty; send one row for each token"
        raise ContainerError(container, text)
    count = math.prod(shape) * item_size(_RESULT[dtype])
    if count > limit_bytes:
        text = f"the embedding of shape {list(shape)} takes {count} bytes; the limit is"
        raise ContainerTooLarge(container, f"{text} {limit_bytes}")


def wrong_dtype(container: Container, found: str) -> ContainerError:
    """The error for an element type that is not taken."""
    text = f"the embedding's element type is {printable(found)}; convert it to {ACCEPTED}"
    return ContainerError(container, text)


def element_type(dtype: str, order: Order) -> np.dtype[Any]:
    """The NumPy type in which elements lie in the container."""
    return np.dtype(("<" if order == "little" else ">") + _CODE[dtype])


def pack(container: Container, dtype: str, elements: NDArray[Any]) -> EmbeddingArray:
    """`elements`, of any strides and byte order, as an `EmbeddingArray`."""
    little = element_type(_RESULT[dtype], "little")
    try:
        with np.errstate(over="raise"):
            array = np.asarray(elements, dtype=little, order="C")
    except FloatingPointError:
        text = "the embedding's float64 values exceed float32's range; scale them"
        raise ContainerError(container, text) from None
    data = array.reshape(-1).view(np.uint8).data.toreadonly()
    return EmbeddingArray(_RESULT[dtype], elements.shape, data)


def check_length(container: Container, dtype: str, shape: Sequence[int], given: int) -> None:
    """Raises `ContainerError` unless `given` bytes are exactly those of `dtype` and `shape`."""
    wanted = math.prod(shape) * item_size(dtype)
    if given != wanted:
        text = f"its header says {list(shape)} of {dtype}, {wanted} bytes, and {given} follow"
        raise ContainerError(container, f"the embedding is cut short or damaged: {text}")
