"""Tensors cross the wire bit for bit, and a lying header never costs memory."""

import tracemalloc

import numpy as np
import pytest
import torch

from chiasm import tensors, torch_tensors, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.v1 import encoder_service_pb2, image_pb2, tensor_pb2

FLOATS = ["float32", "float16", "bfloat16"]
ALL = [*FLOATS, "int64", "int32", "uint8"]


def _sent(array: tensors.Array) -> tensors.Array:
    buffers = wire.Buffers()
    embedding = image_pb2.ImageEmbedding(features=tensors.to_wire(array, buffers))
    message = encoder_service_pb2.EncodeImageResponse(embedding=embedding)
    back = wire.parse(type(message), wire.serialize(wire.Wired(message, buffers)))
    tensor = back.message.embedding.features
    return tensors.from_wire(tensor, back.data(tensor.data))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 4, 6)])
def test_torch_tensors_cross_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 50).to(torch_tensors.dtype_of(name))
    back = torch_tensors.to_torch(_sent(torch_tensors.from_torch(tensor)))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("layout", ["transposed", "strided", "big-endian", "fortran"])
def test_any_numpy_layout_arrives_row_major(layout: str) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "big-endian": base.astype(">f4"),
        "fortran": np.asfortranarray(base),
    }[layout]
    assert np.array_equal(_sent(tensors.from_numpy(array)).storage, array)


@pytest.mark.parametrize("name", FLOATS)
def test_values_as_float32_are_those_of_torch(name: str) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(5, 9).to(torch_tensors.dtype_of(name))
    array = torch_tensors.from_torch(tensor)
    assert np.array_equal(array.to_float32(), tensor.float().numpy())


def test_receiving_copies_nothing_and_keeps_the_bytes_alive() -> None:
    received = bytes(range(16))
    message = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_UINT8, shape=[16])
    array = tensors.from_wire(message, received)
    assert array.storage.base is not None
    assert np.shares_memory(array.storage, np.frombuffer(received, np.uint8))
    assert torch_tensors.to_torch(array).data_ptr() == array.storage.ctypes.data


@pytest.mark.parametrize(
    ("data_type", "shape", "size", "field"),
    [
        (0, [4], 16, "data_type"),
        (99, [4], 16, "data_type"),
        (1, [], 4, "shape"),
        (1, [0, 4], 0, "shape"),
        (1, [-1, -4], 16, "shape"),
        (1, [1] * 9, 4, "shape"),
        (1, [2**20, 2**20], 16, "shape"),
        (1, [2**62, 4], 16, "shape"),
        (1, [2**32, 2**32, 2**32], 0, "shape"),
        (1, [4], 15, "data"),
        (1, [4], 17, "data"),
        (3, [4], 16, "data"),
    ],
)
def test_a_lying_header_is_refused_by_field_before_any_allocation(
    data_type: int, shape: list[int], size: int, field: str
) -> None:
    message = tensor_pb2.Tensor(shape=shape)
    message.data_type = data_type  # type: ignore[assignment]
    data = b"\x00" * size
    tracemalloc.start()
    try:
        with pytest.raises(ChiasmError) as caught:
            tensors.from_wire(message, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (caught.value.reason, caught.value.field) == (Reason.TENSOR_INVALID, field)
    assert peak < 100_000
