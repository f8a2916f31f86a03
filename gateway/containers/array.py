"""What every container becomes, and the one place that decides what is taken.

Of an embedding: float32, float16 and bfloat16 as they are; float64 is rounded to float32, and
refused where a finite value would become infinite. Of the few numbers beside it: int32 and int64.
Everything else is refused. NaN, infinities and the meaning of the axes are the caller's to judge.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Container: TypeAlias = Literal["torch", "npy", "safetensors", "raw", "base64", "unknown"]
Order: TypeAlias = Literal["little", "big"]

MAX_RANK: Final = 4
# NumPy has no bfloat16; its two bytes are moved about as an unsigned integer.
_CODE: Final = {
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "float64": "f8",
    "int32": "i4",
    "int64": "i8",
}
_MOST_SHOWN: Final = 48  # characters of a name that came with the input


class ContainerError(ValueError):
    """Bytes that hold no embedding. `message` is safe for the wire: of the input it repeats
    numbers and short printable names only."""

    def __init__(self, container: Container, message: str) -> None:
        super().__init__(message)
        self.container: Final[Container] = container
        self.message: Final[str] = message


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader may take.

    Attributes:
        what: what messages call it.
        results: the element types taken, each with the one that it becomes.
        hint: how to mend a shape without elements.
        limit_bytes: most bytes of the array that is given.
    """

    what: str
    results: Mapping[str, str]
    hint: str
    limit_bytes: int


def embedding(limit_bytes: int) -> Wanted:
    """Feature rows of at most `limit_bytes`."""
    return Wanted("the embedding", _FLOATS, "send one row for each token", limit_bytes)


def integers(limit_count: int) -> Wanted:
    """At most `limit_count` whole numbers."""
    return Wanted("the tensor", _INTEGERS, "send its numbers as a list", 8 * limit_count)


_FLOATS: Final = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float32",
}
_INTEGERS: Final = {"int32": "int64", "int64": "int64"}


class ContainerTooLarge(ContainerError):
    """The embedding is, or says it is, larger than the limit; nothing was allocated for it."""


@dataclass(frozen=True, slots=True)
class EmbeddingArray:
    """One dense tensor.

    `dtype`: float32, float16 or bfloat16; int64 where whole numbers were wanted. `shape`: 1 to 4
    axes, each 1 or more. `data`: read-only little-endian bytes in row-major order; a view of the
    input wherever that already was so.
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


def check_shape(container: Container, dtype: str, shape: Sequence[int], wanted: Wanted) -> None:
    """Raises `ContainerError` unless an array of `dtype` and `shape` may be built.

    Python integers do not overflow, so the product is exact whatever the container claims.
    """
    what = wanted.what
    if not shape:
        raise ContainerError(container, f"{what} is a scalar; {wanted.hint}")
    if len(shape) > MAX_RANK:
        text = f"{what} has {len(shape)} axes; send at most {MAX_RANK}"
        raise ContainerError(container, text)
    if 0 in shape:
        text = f"{what} of shape {list(shape)} is empty; {wanted.hint}"
        raise ContainerError(container, text)
    count = math.prod(shape) * item_size(wanted.results[dtype])
    if count > wanted.limit_bytes:
        text = f"{what} of shape {list(shape)} takes {count} bytes; the limit is"
        raise ContainerTooLarge(container, f"{text} {wanted.limit_bytes}")


def check_dtype(container: Container, dtype: str, found: str, wanted: Wanted) -> None:
    """Raises `ContainerError` unless `dtype` is taken; `found` is the container's name of it."""
    if dtype in wanted.results:
        return
    *others, last = wanted.results
    accepted = f"{', '.join(others)} or {last}"
    text = f"{wanted.what}'s element type is {printable(found)}; convert it to {accepted}"
    raise ContainerError(container, text)


def element_type(dtype: str, order: Order) -> np.dtype[Any]:
    """The NumPy type in which elements lie in the container."""
    return np.dtype(("<" if order == "little" else ">") + _CODE[dtype])


def pack(
    container: Container, dtype: str, elements: NDArray[Any], wanted: Wanted
) -> EmbeddingArray:
    """`elements`, of any strides and byte order, as an `EmbeddingArray`."""
    result = wanted.results[dtype]
    little = element_type(result, "little")
    try:
        with np.errstate(over="raise"):
            array = np.asarray(elements, dtype=little, order="C")
    except FloatingPointError:
        text = "the embedding's float64 values exceed float32's range; scale them"
        raise ContainerError(container, text) from None
    data = array.reshape(-1).view(np.uint8).data.toreadonly()
    return EmbeddingArray(result, elements.shape, data)


def check_length(
    container: Container, dtype: str, shape: Sequence[int], given: int, wanted: Wanted
) -> None:
    """Raises `ContainerError` unless `given` bytes are exactly those of `dtype` and `shape`."""
    due = math.prod(shape) * item_size(dtype)
    if given != due:
        text = f"its header says {list(shape)} of {dtype}, {due} bytes, and {given} follow"
        raise ContainerError(container, f"{wanted.what} is cut short or damaged: {text}")
