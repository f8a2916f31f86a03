"""A held embedding as bytes for a store that is not trusted: its protobuf, framed by a digest.

Layout: 8 bytes of magic, 32 bytes SHA-256 over key and body, then the body, a serialised
`chiasm.v1.ImageEmbedding`. The digest tells damage and mix-ups, not forgery; whoever reads checks
the embedding against the model's contract as if a caller had sent it. An alias is framed alike.
"""

import hashlib

from chiasm import tensors, torch_tensors, wire
from chiasm.models.contract import ImageContract
from chiasm.models.identity import EncoderIdentity
from chiasm.models.wire import identity_to_wire
from chiasm.v1 import image_pb2
from llm_service.embeddings import Rows, check_embedding
from llm_service.holding.values import ID_PREFIX, Binding
from llm_service.request import CallerEmbedding

_ROWS_MAGIC = b"chiasmE1"
_ALIAS_MAGIC = b"chiasmA1"
_DIGEST_BYTES = 32


class FrameError(Exception):
    """Bytes that are no frame of ours, or that belong to another key."""


def pack_rows(key: bytes, rows: Rows, identity: EncoderIdentity) -> bytes:
    """The bytes of `rows` under `key`. Copies and hashes them: not on the event loop."""
    buffers = wire.Buffers()
    body = wire.serialize(wire.Wired(to_message(rows, identity, buffers), buffers))
    return _framed(_ROWS_MAGIC, key, body)


def unpack_rows(key: bytes, framed: bytes, contract: ImageContract) -> Rows:
    """The rows that `pack_rows` packed under `key`, checked against the contract and named.

    Raises FrameError, or ChiasmError where the contract is broken.
    """
    body = _body(_ROWS_MAGIC, key, framed)
    wired = wire.parse(image_pb2.ImageEmbedding, body)
    message = wired.message
    levels = tuple(wired.data(level.data) for level in message.levels)
    embedding = CallerEmbedding(message, wired.data(message.features.data), levels)
    return check_embedding(embedding, contract).named(contract.expected_identity)


def to_message(
    rows: Rows, identity: EncoderIdentity, buffers: wire.Buffers | None
) -> image_pb2.ImageEmbedding:
    """The message of `rows`, its elements in `buffers`, or left out without any."""
    arrays = [torch_tensors.from_torch(part) for part in (rows.rows, *rows.levels)]
    features, *levels = [
        tensors.describe(array) if buffers is None else tensors.to_wire(array, buffers)
        for array in arrays
    ]
    message = image_pb2.ImageEmbedding(
        features=features,
        levels=levels,
        row_count=rows.form.row_count,
        placeholder_count=rows.form.row_count,
    )
    if rows.form.grid_thw is not None:
        temporal, height, width = rows.form.grid_thw
        message.grid_thw.temporal, message.grid_thw.height = temporal, height
        message.grid_thw.width = width
    if rows.image_size is not None:
        message.image_size.height, message.image_size.width = rows.image_size
    if rows.identity_checked:
        message.identity.CopyFrom(identity_to_wire(identity))
    return message


def pack_binding(key: bytes, binding: Binding) -> bytes:
    """The bytes of what an alias names."""
    file = binding.file or bytes(_DIGEST_BYTES)
    return _framed(_ALIAS_MAGIC, key, binding.rows + file + binding.id.encode())


def unpack_binding(key: bytes, framed: bytes) -> Binding:
    """What `pack_binding` packed under `key`. Raises FrameError."""
    body = _body(_ALIAS_MAGIC, key, framed)
    rows, file = body[:_DIGEST_BYTES], body[_DIGEST_BYTES : 2 * _DIGEST_BYTES]
    id = bytes(body[2 * _DIGEST_BYTES :]).decode("ascii", "replace")
    if not id.startswith(ID_PREFIX):
        raise FrameError("it names no embedding")
    return Binding(id, bytes(rows), bytes(file) if any(file) else b"")


def _framed(magic: bytes, key: bytes, body: bytes) -> bytes:
    return b"".join((magic, _digest(magic, key, body), body))


def _body(magic: bytes, key: bytes, framed: bytes) -> memoryview:
    view = memoryview(framed)
    start = len(magic) + _DIGEST_BYTES
    body = view[start:]
    if view[: len(magic)] != magic:
        raise FrameError("it does not begin as ours do")
    if bytes(view[len(magic) : start]) != _digest(magic, key, body):
        raise FrameError("its digest is another")
    return body


def _digest(magic: bytes, key: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(magic + len(key).to_bytes(8, "little") + key)
    digest.update(body)
    return digest.digest()
