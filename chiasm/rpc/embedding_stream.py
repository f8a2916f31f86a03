"""The streaming form of an embedding: cut into chunks by one end, checked and joined by the other.

A receiver allocates what the header's types and shapes need, and only after it compared that with
the stated total and with its own limit; offsets, length and digest must fit to the byte.
"""

import hashlib
from collections.abc import AsyncIterator, Iterator
from math import prod

from chiasm import tensors, wire
from chiasm.errors import ChiasmError, Reason
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.v1 import encoder_service_pb2, image_pb2, tensor_pb2

Event = wire.Wired[encoder_service_pb2.EncodeImageStreamResponse]
Reply = wire.Wired[encoder_service_pb2.EncodeImageResponse]
# Largest embedding that travels at all, in bytes.
MAX_STREAMED_BYTES = 512 << 20


def send_embedding(reply: Reply) -> Iterator[Event]:
    """The messages of a chunked reply: header, chunks, trailer."""
    message = reply.message
    pieces = [reply.data(tensor.data) for tensor in _tensors(message.embedding)]
    yield wire.plain(
        encoder_service_pb2.EncodeImageStreamResponse(
            header=encoder_service_pb2.StreamHeader(
                embedding=_without_data(message.embedding),
                total_byte_count=sum(len(piece) for piece in pieces),
                source=message.source,
                timings=message.timings,
                encoder_name=message.encoder_name,
            )
        )
    )
    digest = hashlib.sha256()
    offset = 0
    for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            chunk = piece[start : start + CHUNK_BYTES]
            digest.update(chunk)
            yield _chunk(offset, chunk)
            offset += len(chunk)
    trailer = encoder_service_pb2.StreamTrailer(digest=digest.digest())
    yield wire.plain(encoder_service_pb2.EncodeImageStreamResponse(trailer=trailer))


async def receive_embedding(events: AsyncIterator[Event]) -> Reply:
    """The reply that a stream carries. Raises TENSOR_INVALID if it breaks the form."""
    joining: _Joining | None = None
    async for event in events:
        kind = event.message.WhichOneof("event")
        if joining is None:
            if kind != "header":
                raise _broken("it does not begin with a header")
            joining = _Joining(event.message.header)
        elif kind == "chunk":
            chunk = event.message.chunk
            joining.add(chunk.byte_offset, event.data(chunk.data))
        elif kind == "trailer":
            return joining.finish(event.message.trailer.digest)
        else:
            raise _broken("it has a second header")
    raise _broken("it ends without a trailer")


class _Joining:
    def __init__(self, header: encoder_service_pb2.StreamHeader) -> None:
        self._header = header
        self._sizes = [_byte_count(tensor) for tensor in _tensors(header.embedding)]
        total = sum(self._sizes)
        if total != header.total_byte_count or total > MAX_STREAMED_BYTES:
            raise _broken("its shapes and its stated size disagree, or exceed the limit")
        self._joined = bytearray(total)
        self._filled = 0
        self._digest = hashlib.sha256()

    def add(self, offset: int, chunk: memoryview) -> None:
        end = offset + len(chunk)
        if offset != self._filled or not chunk or end > len(self._joined):
            raise _broken("a chunk is out of place")
        self._joined[offset:end] = chunk
        self._digest.update(chunk)
        self._filled = end

    def finish(self, digest: bytes) -> Reply:
        if self._filled != len(self._joined) or digest != self._digest.digest():
            raise _broken("bytes are missing or its digest is wrong")
        buffers = wire.Buffers()
        embedding = image_pb2.ImageEmbedding()
        embedding.CopyFrom(self._header.embedding)
        rest = memoryview(self._joined).toreadonly()
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
