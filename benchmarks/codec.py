"""`python -m benchmarks.codec`: an embedding from array to array, against a plain copy of it.

Prints, per size, the time from an array to received array (serialise, one copy as a socket's reader
makes it, parse) through Chiasm's codec and through the stock protobuf stubs, the rate of a plain
copy (memcpy) measured in the same run, and the copies that each way makes: the peak of memory
allocated on the way, in multiples of the tensor. Medians of many runs.
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from chiasm import memory, tensors, wire
from chiasm.v1 import encoder_service_pb2, image_pb2, tensor_pb2

SIZES_MB = (1, 5, 40, 120)
RUNS = 15
Way = Callable[[tensors.Array], None]


def ours(array: tensors.Array) -> None:
    buffers = wire.Buffers()
    embedding = image_pb2.ImageEmbedding(features=tensors.to_wire(array, buffers))
    message = encoder_service_pb2.EncodeImageResponse(embedding=embedding)
    sent = wire.serialize(wire.Wired(message, buffers))
    received = wire.parse(encoder_service_pb2.EncodeImageResponse, sent)
    tensor = received.message.embedding.features
    tensors.from_wire(tensor, received.data(tensor.data)).storage  # noqa: B018


def stock(array: tensors.Array) -> None:
    tensor = tensor_pb2.Tensor(
        data_type=array.data_type.wire, shape=array.shape, data=array.storage.tobytes()
    )
    embedding = image_pb2.ImageEmbedding(features=tensor)
    sent = encoder_service_pb2.EncodeImageResponse(embedding=embedding).SerializeToString()
    received = encoder_service_pb2.EncodeImageResponse.FromString(sent)
    data = received.embedding.features.data
    np.frombuffer(data, array.data_type.storage).reshape(array.shape)


def plain_copy(array: tensors.Array) -> None:
    bytes(array.data)


def median_seconds(way: Way, array: tensors.Array) -> float:
    way(array)
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        way(array)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_multiple(way: Way, array: tensors.Array) -> float:
    tracemalloc.start()
    way(array)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / array.data.nbytes


def main() -> None:
    memory.tune()
    print(f"{'MB':>5} {'way':>12} {'ms':>8} {'MB/s':>8} {'of memcpy':>10} {'copies held':>12}")
    for megabytes in SIZES_MB:
        values = np.random.default_rng(0).standard_normal((megabytes * 250, 1000), np.float32)
        array = tensors.from_numpy(values)
        copy = median_seconds(plain_copy, array)
        for name, way in (("memcpy", plain_copy), ("chiasm", ours), ("stock stubs", stock)):
            seconds = median_seconds(way, array)
            print(
                f"{megabytes:>5} {name:>12} {seconds * 1000:>8.2f} {megabytes / seconds:>8.0f} "
                f"{copy / seconds:>10.2f} {peak_multiple(way, array):>12.1f}"
            )


if __name__ == "__main__":
    main()
