"""NumPy's `.npy` files, versions 1 to 3, without NumPy's own reader: no pickle, no `eval`.

Format: numpy.lib.format, "Format Version 1.0" to "3.0". The header is the text of a Python dict
of three keys in any order; the elements follow it to the end of the file.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from gateway.containers.array import (
    ContainerError,
    EmbeddingArray,
    Order,
    Wanted,
    check_dtype,
    check_length,
    check_shape,
    element_type,
    pack,
    printable,
)

MAGIC: Final = b"\x93NUMPY"
_LENGTH_BYTES: Final = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}  # version: width of the length
_MAX_HEADER: Final = 10_000  # bytes, NumPy's own limit
_ITEM: Final = re.compile(
    r"""\s*(?P<quote>['"])(?P<key>descr|fortran_order|shape)(?P=quote)\s*:
        \s*(?P<value>'[^']*'|"[^"]*"|True|False|\([0-9,\s]*\))\s*(?:,|$)""",
    re.VERBOSE,
)
_DESCR: Final = re.compile(r"([<>])(f[248]|i[48])")
_DTYPES: Final = {
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "i4": "int32",
    "i8": "int64",
}
_LONGEST_EXTENT: Final = 19  # digits of 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Header:
    descr: str
    dtype: str
    byte_order: Order
    memory_order: Literal["C", "F"]
    shape: tuple[int, ...]


def read_npy(payload: memoryview, wanted: Wanted) -> EmbeddingArray:
    """The array of a `.npy` file. Raises `ContainerError`."""
    text, body = _split(payload)
    header = _parse(text)
    check_dtype("npy", header.dtype, header.descr, wanted)
    check_shape("npy", header.dtype, header.shape, wanted)
    check_length("npy", header.dtype, header.shape, len(body), wanted)
    elements = np.ndarray(
        header.shape,
        dtype=element_type(header.dtype, header.byte_order),
        buffer=body,
        order=header.memory_order,
    )
    return pack("npy", header.dtype, elements, wanted)


def _split(payload: memoryview) -> tuple[str, memoryview]:
    width = _LENGTH_BYTES.get(bytes(payload[6:8]))
    if width is None:
        raise _refusal("is not of version 1, 2 or 3")
    start = 8 + width
    length = int.from_bytes(payload[8:start], "little")
    if length > _MAX_HEADER or start + length > len(payload):
        raise _refusal(f"says that its header takes {length} bytes, too many or more than follow")
    try:
        return str(payload[start : start + length], "ascii"), payload[start + length :]
    except UnicodeDecodeError:
        raise _refusal("has characters outside ASCII in its header") from None


def _parse(text: str) -> _Header:
    items = _items(text)
    if items.keys() != {"descr", "fortran_order", "shape"}:
        raise _malformed(text)
    if items["fortran_order"] not in ("True", "False") or items["descr"][0] not in "'\"":
        raise _malformed(text)
    descr = items["descr"][1:-1]
    dtype, byte_order = _dtype(descr)
    memory_order: Literal["C", "F"] = "F" if items["fortran_order"] == "True" else "C"
    return _Header(descr, dtype, byte_order, memory_order, _shape(items["shape"]))


def _items(text: str) -> dict[str, str]:
    body = text.strip()
    if body[:1] != "{" or body[-1:] != "}":
        raise _malformed(text)
    items: dict[str, str] = {}
    body, at = body[1:-1].rstrip(), 0
    while at < len(body):
        item = _ITEM.match(body, at)
        if item is None or item["key"] in items:
            raise _malformed(text)
        items[item["key"]] = item["value"]
        at = item.end()
    return items


def _dtype(descr: str) -> tuple[str, Order]:
    found = _DESCR.fullmatch(descr)
    if found is not None:
        return _DTYPES[found[2]], "little" if found[1] == "<" else "big"
    if "O" in descr:
        raise _refusal("holds pickled objects, which are never loaded")
    if descr[1:] == "V2":
        raise _refusal("has element type V2, which may be bfloat16, a type unknown to this format")
    return "", "little"  # a type that no reader takes


def _shape(value: str) -> tuple[int, ...]:
    extents = [extent.strip() for extent in value[1:-1].split(",")]
    if value[:1] != "(" or (len(extents) == 1 and extents[0]):  # (3) is a number in Python
        raise _malformed(value)
    if not extents[-1]:
        extents.pop()
    if not all(extent.isdecimal() and len(extent) <= _LONGEST_EXTENT for extent in extents):
        raise _malformed(value)
    return tuple(int(extent) for extent in extents)


def _malformed(text: str) -> ContainerError:
    if "[" in text:
        return _refusal("has a structured element type")
    return _refusal(f"has a header that is not understood: {printable(text.strip())}")


def _refusal(found: str) -> ContainerError:
    mend = "save a plain array with numpy.save(f, array.astype('float32'))"
    return ContainerError("npy", f"the .npy file {found}; {mend}")
