"""Messages with large byte fields, read and written without copying those fields.

Protobuf's Python runtime copies a `bytes` field when it parses, when it is read and when it is
written. Here the large fields (`Tensor.data`, `Image.data`, `StreamChunk.data`) are cut out of the
received bytes before parsing and spliced in after serialising; in the message object they hold a
four-byte ticket. What travels is plain protobuf: stubs of any language read and write it.

A message with its buffers is a `Wired`. Copies of a tensor: none in, one out.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from chiasm.errors import ChiasmError, Reason

M = TypeVar("M", bound=Message)
Buffer = bytes | bytearray | memoryview

LARGE_FIELDS = frozenset(
    {"chiasm.v1.Tensor.data", "chiasm.v1.Image.data", "chiasm.v1.StreamChunk.data"}
)
_TICKET = struct.Struct("<I")
# Wire types of the protobuf encoding: https://protobuf.dev/programming-guides/encoding/
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_SMALL = 1 << 16  # bytes


class Buffers:
    """The large byte fields of one message, each named by the ticket that stands in its place."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []

    def put(self, data: Buffer) -> bytes:
        """Holds `data` (C-contiguous) and returns the ticket to store in the message's field."""
        view = memoryview(data)
        self._views.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        return _TICKET.pack(len(self._views) - 1)

    def get(self, ticket: bytes) -> memoryview:
        """The bytes behind `ticket`; an absent field's empty ticket stands for no bytes."""
        if not ticket:
            return memoryview(b"")
        (number,) = _TICKET.unpack(ticket)
        view: memoryview = self._views[number]
        return view

    def __bool__(self) -> bool:
        return bool(self._views)

    @property
    def byte_count(self) -> int:
        """Bytes of all large fields together."""
        return sum(len(view) for view in self._views)


@dataclass(frozen=True)
class Wired(Generic[M]):
    """A message whose large byte fields hold tickets, and the bytes that they stand for."""

    message: M
    buffers: Buffers

    def data(self, ticket: bytes) -> memoryview:
        """The bytes of a large field: `wired.data(wired.message.image.data)`."""
        return self.buffers.get(ticket)


def plain(message: M) -> Wired[M]:
    """A message that carries no large field."""
    return Wired(message, Buffers())


def parse(kind: type[M], received: Buffer) -> Wired[M]:
    """Parses `received`, whose large fields become views of it.

    Raises REQUEST_INVALID if the bytes are not a message of that kind.
    """
    buffers = Buffers()
    descriptor = _descriptor(kind)
    try:
        if not _plan(descriptor):
            return Wired(kind.FromString(bytes(received)), buffers)
        skeleton = _rewrite(memoryview(received), descriptor, buffers.put)
        return Wired(kind.FromString(b"".join(skeleton)), buffers)
    except (_Malformed, DecodeError):
        raise ChiasmError(
            Reason.REQUEST_INVALID, f"The bytes received are no valid {kind.DESCRIPTOR.full_name}."
        ) from None


def serialize(wired: Wired[M]) -> bytes:
    """The protobuf bytes of a message: one copy of each large field, into the result."""
    skeleton = memoryview(wired.message.SerializeToString())
    if not wired.buffers:
        return bytes(skeleton)
    get = wired.buffers.get
    kind = _descriptor(type(wired.message))
    pieces = _rewrite(skeleton, kind, lambda view: get(bytes(view)))
    # `join` lets other threads go on while it copies objects of bytes, but not views of them.
    return b"".join(map(_as_object, pieces))


def _as_object(piece: Buffer) -> Buffer:
    if not isinstance(piece, memoryview):
        return piece
    whole = piece.obj
    if isinstance(whole, bytes) and len(whole) == len(piece):
        return whole
    return bytes(piece) if len(piece) < _SMALL else piece


def _descriptor(kind: type[Message]) -> Descriptor:
    # protobuf's types name two implementations of one interface.
    return cast(Descriptor, kind.DESCRIPTOR)


class _Malformed(Exception):
    """Bytes that break the protobuf encoding."""


Exchange = Callable[[memoryview], Buffer]


def _rewrite(source: memoryview, kind: Descriptor, exchange: Exchange) -> list[Buffer]:
    """`source` in pieces, with the content of every large field passed through `exchange`."""
    plan = _plan(kind)
    if not plan:
        return [source]
    pieces: list[Buffer] = []
    kept_from = 0
    for number, start, content, end in _length_delimited(source):
        if number not in plan:
            continue
        inner, step = source[content:end], plan[number]
        changed = [exchange(inner)] if step is None else _rewrite(inner, step, exchange)
        pieces.append(source[kept_from:start])
        pieces.append(_varint(sum(len(piece) for piece in changed)))
        pieces.extend(changed)
        kept_from = end
    pieces.append(source[kept_from:])
    return pieces


def _length_delimited(source: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Field number, start of the length, start and end of the content, for each such field."""
    position, size = 0, len(source)
    while position < size:
        tag, position = _read_varint(source, position)
        wire_type = tag & 7
        if wire_type == _LEN:
            start = position
            length, position = _read_varint(source, position)
            if length > size - position:
                raise _Malformed
            yield tag >> 3, start, position, position + length
            position += length
        elif wire_type == _VARINT:
            _, position = _read_varint(source, position)
        elif wire_type in {_I64, _I32}:
            position += 8 if wire_type == _I64 else 4
            if position > size:
                raise _Malformed
        else:  # groups, and numbers without meaning: no field of ours uses them
            raise _Malformed


def _read_varint(source: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        if position >= len(source):
            raise _Malformed
        byte = source[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _Malformed


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@cache
def _plan(kind: Descriptor) -> dict[int, Descriptor | None]:
    """The fields of `kind` that are large (None) or somewhere hold a large one (their type)."""
    plan: dict[int, Descriptor | None] = {}
    for entry in kind.fields:
        if entry.full_name in LARGE_FIELDS:
            plan[entry.number] = None
        elif entry.message_type is not None and _holds_large(entry.message_type):
            plan[entry.number] = entry.message_type
    return plan


def _holds_large(kind: Descriptor, above: frozenset[str] = frozenset()) -> bool:
    if kind.full_name in above:  # a recursive type: its other fields decide
        return False
    inside = above | {kind.full_name}
    return any(
        entry.full_name in LARGE_FIELDS
        or (entry.message_type is not None and _holds_large(entry.message_type, inside))
        for entry in kind.fields
    )


def as_bytes_view(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> memoryview:
    """A flat byte view of a C-contiguous array; raises ValueError for any other layout."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous")
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
