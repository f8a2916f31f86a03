"""The streaming form of an embedding: cut into chunks by one end, checked and joined by the other.

A receiver allocates what the header's types and shapes need, and only after it compared that with
the stated total and with its own limit; offsets, length and checksum must fit to the byte.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from math import prod

import numpy as np
import xxhash

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.limits import LEAST_CHUNK_BYTES, MAX_CHUNK_BYTES, MOST_CHUNK_BYTES
from chiasm.v1 import encoder_service_pb2, image_pb2, tensor_pb2

Event = wire.Wired[encoder_service_pb2.EncodeImageStreamResponse]
Reply = wire.Wired[encoder_service_pb2.EncodeImageResponse]
# Largest embedding that travels at all, in bytes.
MAX_STREAMED_BYTES = 512 << 20


def chunk_bytes(total: int) -> int:
    """Bytes of each chunk but the last of an embedding of `total` bytes."""
    return min(max(total // 8, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)


def send_embedding(reply: Reply) -> Iterator[Event]:
    """The messages of a chunked reply: header, chunks, trailer."""
    message = reply.message
    pieces = [reply.data(tensor.data) for tensor in _tensors(message.embedding)]
    total = sum(map(len, pieces))
    yield wire.plain(
        encoder_service_pb2.EncodeImageStreamResponse(
            header=encoder_service_pb2.StreamHeader(
                embedding=_without_data(message.embedding),
                total_byte_count=total,
                source=message.source,
                timings=message.timings,
                encoder_name=message.encoder_name,
            )
        )
    )
    checksum = xxhash.xxh3_64()
    offset, size = 0, chunk_bytes(total)
    for piece in pieces:
        for start in range(0, len(piece), size):
            chunk = piece[start : start + size]
            checksum.update(chunk)
            yield _chunk(offset, chunk)
            offset += len(chunk)
    trailer = encoder_service_pb2.StreamTrailer(checksum=checksum.intdigest())
    yield wire.plain(encoder_service_pb2.EncodeImageStreamResponse(trailer=trailer))


async def receive_embedding(events: AsyncGenerator[Event, None]) -> Reply:
    """The reply that a stream carries. Ends the stream whatever happens.

    Raises TENSOR_INVALID if it breaks the form, before another event is awaited.
    """
    async with aclosing(events):
        joining = _Joining(_header(await anext(events, None)))
        # To the stream's own end, so that the sender sees a call that went well.
        async for event in events:
            match event.message.WhichOneof("event"):
                case "chunk":
                    chunk = event.message.chunk
                    joining.add(chunk.byte_offset, event.data(chunk.data))
                case "trailer":
                    joining.close(event.message.trailer.checksum)
                case _:
                    raise _broken("it has a second header")
        return joining.reply()


def _header(event: Event | None) -> encoder_service_pb2.StreamHeader:
    if event is None or event.message.WhichOneof("event") != "header":
        raise _broken("it does not begin with a header")
    return event.message.header


class _Joining:
    def __init__(self, header: encoder_service_pb2.StreamHeader) -> None:
        self._header = header
        self._sizes = [_byte_count(tensor) for tensor in _tensors(header.embedding)]
        total = sum(self._sizes)
        if total != header.total_byte_count or total > MAX_STREAMED_BYTES:
            raise _broken("its shapes and its stated size disagree, or exceed the limit")
        # Not zeroed, which would touch all of it at once: a reply counts only if all is filled.
        self._joined = wire.as_bytes_view(np.empty(total, np.uint8))
        self._filled = 0
        self._checksum = xxhash.xxh3_64()
        self._closed = False

    def add(self, offset: int, chunk: memoryview) -> None:
        end = offset + len(chunk)
        if offset != self._filled or not chunk or end > len(self._joined):
            raise _broken("a chunk is out of place")
        if len(chunk) > MAX_CHUNK_BYTES:
            raise _broken(f"a chunk has more than {MAX_CHUNK_BYTES} bytes")
        self._joined[offset:end] = chunk
        self._checksum.update(chunk)
        self._filled = end

    def close(self, checksum: int) -> None:
        if self._closed:
            raise _broken("it has a second trailer")
        if self._filled != len(self._joined) or checksum != self._checksum.intdigest():
            raise _broken("bytes are missing or its checksum is wrong")
        self._closed = True

    def reply(self) -> Reply:
        if not self._closed:
            raise _broken("it ends without a trailer")
        buffers = wire.Buffers()
        embedding = image_pb2.ImageEmbedding()
        embedding.CopyFrom(self._header.embedding)
        rest = self._joined.toreadonly()
        for tensor, size in zip(_tensors(embedding), self._sizes, strict=True):
            tensor.data = buffers.put(rest[:size])
            rest = rest[size:]
        reply = encoder_service_pb2.EncodeImageResponse(
            embedding=embedding,
            source=self._header.source,
            timings=self._header.timings,
            encoder_name=self._header.encoder_name,
        )
        return wire.Wired(reply, buffers)


def _tensors(embedding: image_pb2.ImageEmbedding) -> list[tensor_pb2.Tensor]:
    return [embedding.features, *embedding.levels]


def _byte_count(tensor: tensor_pb2.Tensor) -> int:
    kind, shape = tensors.checked_form(tensor)
    return prod(shape) * kind.item_bytes


def _without_data(embedding: image_pb2.ImageEmbedding) -> image_pb2.ImageEmbedding:
    bare = image_pb2.ImageEmbedding()
    bare.CopyFrom(embedding)
    for tensor in _tensors(bare):
        tensor.ClearField("data")
    return bare


def _chunk(offset: int, data: memoryview) -> Event:
    buffers = wire.Buffers()
    chunk = encoder_service_pb2.StreamChunk(byte_offset=offset, data=buffers.put(data))
    return wire.Wired(encoder_service_pb2.EncodeImageStreamResponse(chunk=chunk), buffers)


def _broken(what: str) -> ChiasmError:
    return ChiasmError(Reason.TENSOR_INVALID, f"The chunked embedding is broken: {what}.")
