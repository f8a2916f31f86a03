"""Safetensors files that hold exactly one tensor.

Format: the README of huggingface/safetensors, section "Format": eight bytes of little-endian
header length, a JSON object, then the tensors' little-endian row-major bytes without holes.
A second tensor is refused rather than left out in silence.
"""

import json
from typing import Any, Final, NoReturn

import numpy as np

from gateway.containers.array import (
    ContainerError,
    EmbeddingArray,
    Wanted,
    check_dtype,
    check_length,
    check_shape,
    element_type,
    pack,
    printable,
)

_LENGTH_BYTES: Final = 8
_MAX_HEADER: Final = 2**18  # bytes; one tensor takes about 80
_MAX_COMMAS: Final = 1024  # one tensor has 4; a parsed name takes twenty times its bytes
_MOST_NAMES: Final = 8  # shown in a message
_LARGEST: Final = 2**63 - 1
DTYPES: Final = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
}


def looks_like_safetensors(payload: memoryview) -> bool:
    """Whether a JSON object begins where a safetensors header would."""
    return len(payload) > _LENGTH_BYTES and payload[_LENGTH_BYTES] == ord("{")


def read_safetensors(payload: memoryview, wanted: Wanted) -> EmbeddingArray:
    """The only tensor of a safetensors file, whatever its name. Raises `ContainerError`."""
    header, body = split_file(payload)
    found, shape, (begin, end) = fields_of(_only_tensor(header))
    dtype = DTYPES.get(found, "")
    check_dtype("safetensors", dtype, found, wanted)
    check_shape("safetensors", dtype, shape, wanted)
    if begin != 0 or end != len(body):
        raise _refusal(f"has data_offsets [{begin}, {end}] for a body of {len(body)} bytes")
    check_length("safetensors", dtype, shape, len(body), wanted)
    elements = np.ndarray(shape, dtype=element_type(dtype, "little"), buffer=body)
    return pack("safetensors", dtype, elements, wanted)


def split_file(payload: memoryview) -> tuple[dict[str, Any], memoryview]:
    length = int.from_bytes(payload[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > _MAX_HEADER or start > len(payload):
        text = f"says that its header takes {length} bytes; at most {_MAX_HEADER} are read,"
        raise _refusal(f"{text} and {len(payload) - _LENGTH_BYTES} follow")
    return _parse(bytes(payload[_LENGTH_BYTES:start])), payload[start:]


def _parse(text: bytes) -> dict[str, Any]:
    if text.count(b",") > _MAX_COMMAS:
        raise _refusal(
            f"has more than {_MAX_COMMAS} commas in its header, far more than one tensor"
        )
    try:
        header = json.loads(
            str(text, "utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except ContainerError:
        raise
    except (ValueError, RecursionError):
        raise _refusal("has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise _refusal("has a header that is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _refusal("names something twice in its header")
    return fields


def _no_constant(_: str) -> NoReturn:
    raise _refusal("has a header that is not JSON")


def _only_tensor(header: dict[str, Any]) -> Any:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _refusal("has a __metadata__ that does not map text to text")
    if len(header) == 1:
        return next(iter(header.values()))
    names = ", ".join(printable(name) for name in list(header)[:_MOST_NAMES])
    more = ", ..." if len(header) > _MOST_NAMES else ""
    raise _refusal(f"holds {len(header)} tensors ({names}{more})" if header else "holds no tensor")


def fields_of(tensor: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
        raise _refusal("describes its tensor by other fields than dtype, shape and data_offsets")
    dtype = tensor["dtype"]
    if not isinstance(dtype, str):
        raise _refusal("has a dtype that is not text")
    offsets = _sizes(tensor["data_offsets"])
    if len(offsets) != 2:
        raise _refusal("has data_offsets that are not a pair")
    return dtype, _sizes(tensor["shape"]), (offsets[0], offsets[1])


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise _refusal("has a shape or data_offsets that is not a list")
    if not all(type(value) is int and 0 <= value <= _LARGEST for value in values):
        raise _refusal("has a number in its header that is no size")
    return tuple(values)


def _refusal(found: str) -> ContainerError:
    mend = "save one tensor with safetensors.numpy.save({'image_embeds': array})"
    return ContainerError("safetensors", f"the safetensors file {found}; {mend}")
