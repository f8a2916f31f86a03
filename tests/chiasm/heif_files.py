"""HEIF files box by box, as no encoder writes them. ISO/IEC 14496-12 and 23008-12."""

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

import chiasm.images  # noqa: F401  (teaches Pillow HEIC)


@dataclass(frozen=True)
class Item:
    """`properties` count from 1 within the file's list of them."""

    id: int
    kind: bytes
    data: bytes
    properties: Sequence[int]


def box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", len(body) + 8, kind) + body


def full(kind: bytes, version: int, flags: int, *parts: bytes) -> bytes:
    return box(kind, struct.pack(">I", version << 24 | flags), *parts)


def ispe(width: int, height: int) -> bytes:
    return full(b"ispe", 0, 0, struct.pack(">II", width, height))


def clap(width: int, height: int) -> bytes:
    return box(b"clap", struct.pack(">8I", width, 1, height, 1, 0, 1, 0, 1))


def irot(quarters: int) -> bytes:
    """Turns anticlockwise."""
    return box(b"irot", bytes([quarters]))


def grid(rows: int, columns: int, width: int, height: int) -> bytes:
    return struct.pack(">BBBBII", 0, 1, rows - 1, columns - 1, width, height)


def overlay(count: int, width: int, height: int) -> bytes:
    return struct.pack(">BB4HII", 0, 1, 0, 0, 0, 0, width, height) + bytes(8 * count)


def refers(kind: bytes, item: int, to: Sequence[int]) -> bytes:
    return box(kind, struct.pack(f">HH{len(to)}H", item, len(to), *to))


def coded(width: int, height: int) -> tuple[bytes, bytes]:
    """The configuration box and the data of one HEVC picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, "HEIF", quality=10)
    raw = file.getvalue()
    meta = dict(_boxes(raw))[b"meta"]
    properties = dict(_boxes(dict(_boxes(meta[4:]))[b"iprp"]))[b"ipco"]
    return box(b"hvcC", dict(_boxes(properties))[b"hvcC"]), dict(_boxes(raw))[b"mdat"]


def heif(
    items: Sequence[Item], properties: Sequence[bytes], references: Sequence[bytes] = ()
) -> bytes:
    """A file whose primary picture is the last of `items`."""
    head = box(b"ftyp", b"heic", bytes(4), b"mif1", b"heic")
    length = len(head) + len(_meta(items, properties, references, 0)) + 8
    data = box(b"mdat", *(item.data for item in items))
    return head + _meta(items, properties, references, length) + data


def _meta(
    items: Sequence[Item], properties: Sequence[bytes], references: Sequence[bytes], offset: int
) -> bytes:
    types, places, associations = [], [], []
    for item in items:
        types.append(full(b"infe", 2, 0, struct.pack(">HH4sB", item.id, 0, item.kind, 0)))
        places.append(struct.pack(">HHHII", item.id, 0, 1, offset, len(item.data)))
        offset += len(item.data)
        indices = bytes(0x80 | index for index in item.properties)
        associations.append(struct.pack(">HB", item.id, len(indices)) + indices)
    return full(
        b"meta", 0, 0,
        full(b"hdlr", 0, 0, bytes(4), b"pict", bytes(13)),
        full(b"pitm", 0, 0, struct.pack(">H", items[-1].id)),
        full(b"iloc", 0, 0, struct.pack(">BBH", 0x44, 0, len(items)), *places),
        full(b"iinf", 0, 0, struct.pack(">H", len(items)), *types),
        full(b"iref", 0, 0, *references),
        box(b"iprp", box(b"ipco", *properties),
            full(b"ipma", 0, 0, struct.pack(">I", len(items)), *associations)),
    )  # fmt: skip


def _boxes(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(raw):
        size, kind = struct.unpack_from(">I4s", raw, at)
        yield kind, raw[at + 8 : at + size]
        at += size
