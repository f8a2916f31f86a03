"""What a HEIF file declares, read from its boxes before a decoder sees it. Pure.

    ftyp, meta { pitm, iinf { infe }, iref { dimg, auxl, cdsc }, iprp { ipco { ispe }, ipma } }, ...

Boxes: ISO/IEC 14496-12; items, references and properties: ISO/IEC 23008-12. A file is a set of
items: coded pictures, and pictures derived from others (a grid of tiles, an overlay). The size that
a decoder reports is that of the last derivation, so a few bytes can hide a coded picture of any
size, or name one a thousand times; and it reads the metadata and profile of every picture in the
file, though one is wanted.

Raises ValueError, LookupError or struct.error for what is against the format or not read here.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Size: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[bytes, int, int]
"""Kind, start and end of what a box holds."""

_MOST: Final = 20_000  # boxes, references and associations; photos have some hundred
_MOST_DEPTH: Final = 8  # derivations of derivations; photos have one
_LEAST_WORK: Final = 1 << 16  # pixels; setting a decoder up costs as much
_DERIVED: Final = frozenset({b"grid", b"iden", b"iovl"})
_HIDDEN: Final = 1


@dataclass(frozen=True)
class Declared:
    """What the primary picture of a file takes.

    Attributes:
        sizes: all (width, height) that the file declares, of parts and of whole pictures.
        work: pixels that are decoded for it, each as often as it is named.
        codings: the types of the items that are decoded, `hvc1` for HEVC.
        alone: the file with no other picture to be seen, and no metadata.
    """

    sizes: tuple[Size, ...]
    work: int
    codings: frozenset[bytes]
    alone: bytes


def declared(raw: bytes) -> Declared:
    """What `raw`, a HEIF file, declares."""
    items = _Items.read(raw)
    seen: dict[int, int] = {}
    work = items.work(items.primary, seen, 0)
    codings = {items.types.get(item, b"") for item in seen} - _DERIVED
    return Declared(tuple(items.properties.values()), work, frozenset(codings), items.alone(raw))


@dataclass
class _Items:
    """The tables of a `meta` box. `sources` and `parts`: item -> the items that it is made of."""

    primary: int = 0
    types: dict[int, bytes] = field(default_factory=dict)
    properties: dict[int, Size] = field(default_factory=dict)
    sizes: dict[int, Size] = field(default_factory=dict)
    sources: dict[int, list[int]] = field(default_factory=dict)
    parts: dict[int, list[int]] = field(default_factory=dict)
    flags_at: dict[int, int] = field(default_factory=dict)
    metadata_at: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, raw: bytes) -> "_Items":
        found = cls()
        start, end = _only(raw, b"meta", 0, len(raw))
        for kind, at, stop in _boxes(raw, start + 4, end):
            if kind == b"pitm":
                (found.primary,) = struct.unpack_from(">I" if raw[at] else ">H", raw, at + 4)
            elif kind == b"iinf":
                found._read_types(raw, at, stop)
            elif kind == b"iref":
                found._read_references(raw, at, stop)
        properties = _only(raw, b"iprp", start + 4, end)
        found._read_properties(raw, *_only(raw, b"ipco", *properties))
        found._read_associations(raw, *_only(raw, b"ipma", *properties))
        return found

    def _read_types(self, raw: bytes, start: int, end: int) -> None:
        for kind, at, _ in _boxes(raw, start + (8 if raw[start] else 6), end):
            if kind != b"infe" or raw[at] not in (2, 3):
                raise ValueError("an item without a type")
            item, _, name = struct.unpack_from(">IH4s" if raw[at] == 3 else ">HH4s", raw, at + 4)
            self.types[item], self.flags_at[item] = name, at + 3

    def _read_references(self, raw: bytes, start: int, end: int) -> None:
        code, width, total = ("I", 4, 0) if raw[start] else ("H", 2, 0)
        for kind, at, _ in _boxes(raw, start + 4, end):
            item, count = struct.unpack_from(f">{code}H", raw, at)
            total += count
            if total > _MOST:
                raise ValueError("too many references")
            to = list(struct.unpack_from(f">{count}{code}", raw, at + width + 2))
            if kind == b"dimg":
                self.sources.setdefault(item, []).extend(to)
            elif kind == b"auxl":
                for one in to:
                    self.parts.setdefault(one, []).append(item)
            elif kind == b"cdsc":
                self.metadata_at.append(at - 4)

    def _read_properties(self, raw: bytes, start: int, end: int) -> None:
        for number, (kind, at, _) in enumerate(_boxes(raw, start, end), 1):
            if kind == b"ispe":
                width, height = struct.unpack_from(">II", raw, at + 4)
                self.properties[number] = width, height

    def _read_associations(self, raw: bytes, start: int, end: int) -> None:
        code, width = ("I", 4) if raw[start] else ("H", 2)
        each = 2 if raw[start + 3] & 1 else 1
        (count,) = struct.unpack_from(">I", raw, start + 4)
        if count > _MOST:
            raise ValueError("too many associations")
        at = start + 8
        for _ in range(count):
            item, number = struct.unpack_from(f">{code}B", raw, at)
            at += width + 1
            for _ in range(number):
                index = int.from_bytes(raw[at : at + each], "big") & (0x7FFF if each == 2 else 0x7F)
                at += each
                if index in self.properties:
                    self.sizes[item] = self.properties[index]
        if at > end:
            raise ValueError("associations beyond their box")

    def work(self, item: int, seen: dict[int, int], depth: int) -> int:
        """Pixels decoded for `item`; `seen` takes the result of all that are decoded for it."""
        if item in seen:
            return seen[item]
        if depth > _MOST_DEPTH:
            raise ValueError("derivations without end")
        width, height = self.sizes[item]
        parts = [*self.sources.get(item, ()), *self.parts.get(item, ())]
        work = max(width * height, _LEAST_WORK)
        work += sum(self.work(part, seen, depth + 1) for part in parts)
        seen[item] = work
        return work

    def alone(self, raw: bytes) -> bytes:
        """`raw` in which all items but the primary one are hidden, and none describes another."""
        copy = bytearray(raw)
        for item, at in self.flags_at.items():
            if item != self.primary:
                copy[at] |= _HIDDEN
        for at in self.metadata_at:
            copy[at : at + 4] = b"free"
        return bytes(copy)


def _only(raw: bytes, kind: bytes, start: int, end: int) -> tuple[int, int]:
    found = [(at, stop) for one, at, stop in _boxes(raw, start, end) if one == kind]
    if len(found) != 1:
        raise ValueError(f"{len(found)} boxes of one kind")
    return found[0]


def _boxes(raw: bytes, start: int, end: int) -> Iterator[Box]:
    for _ in range(_MOST):
        if start + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", raw, start)
        head = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", raw, start + 8)
            head = 16
        stop = end if size == 0 else start + size
        if stop > end or stop < start + head:
            raise ValueError("a box beyond what holds it")
        yield kind, start + head, stop
        start = stop
    raise ValueError("too many boxes")
