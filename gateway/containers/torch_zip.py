"""`torch.save` files (the zip format, PyTorch 1.6 and later) that hold one dense tensor.

Records, under a first path component of any name: `data.pkl` describes the tensor, `data/<key>`
is its storage, `byteorder` says "little" or "big" (absent before 2.1: little), `version` and
`.format_version` number the format. Other records are of no concern to a reader.
"""

from typing import Final

import numpy as np

from gateway.containers.array import (
    EmbeddingArray,
    Order,
    Wanted,
    check_dtype,
    check_shape,
    element_type,
    item_size,
    pack,
    printable,
)
from gateway.containers.torch_pickle import DenseTensor, read_description, refusal
from gateway.containers.zip_records import read_records

# The first bytes of torch.save(..., _use_new_zipfile_serialization=False): a pickled number.
LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_NEWEST_VERSION: Final = 10  # caffe2/serialize/versions.h, kMaxSupportedFileFormatVersion
_MOST_VERSION_BYTES: Final = 8


def read_torch(payload: memoryview, wanted: Wanted) -> EmbeddingArray:
    """The tensor of a `torch.save` file, from whatever device. Raises `ContainerError`."""
    records = _under_prefix(read_records(payload))
    order = _byte_order(records)
    tensor = read_description(records["data.pkl"])
    dtype = tensor.storage.dtype
    check_dtype("torch", dtype, dtype, wanted)
    check_shape("torch", dtype, tensor.shape, wanted)
    data = _storage_bytes(records, tensor)
    _check_bounds(tensor)
    return _view(tensor, data, order, wanted)


def _under_prefix(records: dict[bytes, memoryview]) -> dict[str, memoryview]:
    """The records by their names behind the archive's name, which is free."""
    first = next(iter(records), b"")
    prefix = first[: first.find(b"/") + 1]
    names = {name[len(prefix) :]: data for name, data in records.items() if name.startswith(prefix)}
    if b"constants.pkl" in names:
        raise refusal("a TorchScript program")
    if b"data.pkl" not in names or not prefix:
        raise refusal(f"no data.pkl; its first record is {_shown(first)}")
    return {name.decode("utf-8", "replace"): data for name, data in names.items()}


def _shown(name: bytes) -> str:
    return printable(name.decode("ascii", "replace")) or "absent"


def _byte_order(records: dict[str, memoryview]) -> Order:
    for name in ("version", ".format_version"):
        number = bytes(records.get(name, b"1")[:_MOST_VERSION_BYTES]).strip()
        if not number.isdigit() or int(number) > _NEWEST_VERSION:
            raise refusal("a newer version of the format")
    match bytes(records.get("byteorder", b"little")[:_MOST_VERSION_BYTES]):
        case b"little":
            return "little"
        case b"big":
            return "big"
    raise refusal("an unknown byte order")


def _storage_bytes(records: dict[str, memoryview], tensor: DenseTensor) -> memoryview:
    storage = tensor.storage
    data = records.get(f"data/{storage.key}")
    if data is None:
        raise refusal("a tensor without its storage")
    wanted = storage.count * item_size(storage.dtype)
    if len(data) != wanted:
        raise refusal(f"{len(data)} bytes for a storage of {wanted}")
    return data


def _check_bounds(tensor: DenseTensor) -> None:
    steps = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum((size - 1) * stride for size, stride in steps)
    if last >= tensor.storage.count:
        raise refusal(f"a tensor that reaches element {last} of {tensor.storage.count}")


def _view(tensor: DenseTensor, data: memoryview, order: Order, wanted: Wanted) -> EmbeddingArray:
    dtype, width = tensor.storage.dtype, item_size(tensor.storage.dtype)
    # An axis of one element is never stepped along, so its stride may be any number.
    steps = zip(tensor.shape, tensor.strides, strict=True)
    strides = tuple(stride * width if size > 1 else 0 for size, stride in steps)
    elements = np.ndarray(
        tensor.shape,
        dtype=element_type(dtype, order),
        buffer=data,
        offset=tensor.offset * width,
        strides=strides,
    )
    return pack("torch", dtype, elements, wanted)
