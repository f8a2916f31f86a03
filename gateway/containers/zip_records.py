"""The directory of an uncompressed zip archive whose records do not touch each other.

Format: PKWARE APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16. Only what PyTorch
writes: stored records, one disk, no encryption, no comment, sizes under 4 GiB. CRCs are not
compared: PyTorch does not compare them either, and on request saves files without true ones
(torch.serialization.set_crc32_options).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from gateway.containers.array import ContainerError, printable

MAGIC: Final = b"PK\x03\x04"
_LOCAL: Final = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<4sHHHHIIH")
_END64: Final = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64: Final = struct.Struct("<4sIQI")
_CENTRAL_MAGIC: Final = b"PK\x01\x02"
_END_MAGIC: Final = b"PK\x05\x06"
_END64_MAGIC: Final = b"PK\x06\x06"
_LOCATOR64_MAGIC: Final = b"PK\x06\x07"
_STORED: Final = 0
_KNOWN_FLAGS: Final = 0x0808  # sizes repeated behind the data; names in UTF-8
_IN_ZIP64: Final = 0xFFFFFFFF  # the number is in an extra field: 4 GiB or more
_MAX_RECORDS: Final = 1024  # one tensor takes 7


class ZipError(ContainerError):
    """An archive that is damaged or uses what PyTorch does not write."""

    def __init__(self, found: str) -> None:
        text = f"the zip archive {found}; send the bytes of torch.save(tensor, f) as they are"
        super().__init__("torch", text)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    header: int  # offset of the local header
    size: int


def read_records(payload: memoryview) -> dict[bytes, memoryview]:
    """Name -> bytes of every record, as views of `payload`. Raises `ZipError`.

    The views lie between the start and the directory and never overlap.
    """
    start, stop, count = _find_directory(payload)
    entries = sorted(_entries(payload[start:stop], count), key=lambda entry: entry.header)
    records: dict[bytes, memoryview] = {}
    reached = 0
    for entry in entries:
        if entry.header < reached or entry.name in records:
            raise ZipError("has two records in one place or of one name")
        begin = _data_start(payload, entry)
        reached = begin + entry.size
        if reached > start:
            raise ZipError("has a record that runs past its data")
        records[entry.name] = payload[begin:reached]
    return records


def _find_directory(payload: memoryview) -> tuple[int, int, int]:
    at = len(payload) - _END.size
    if at < 0 or bytes(payload[at : at + 4]) != _END_MAGIC:
        raise ZipError("has no directory at its end, so it was cut short or has bytes after it")
    _, disk, first_disk, here, count, size, start, comment = _END.unpack_from(payload, at)
    stop = _before_zip64(payload, at, (here, count, size, start))
    if disk or first_disk or comment or here != count or start + size != stop:
        raise ZipError("has a directory that contradicts itself")
    if count > _MAX_RECORDS:
        raise ZipError(f"has {count} records, far more than one tensor takes")
    return start, stop, count


def _before_zip64(payload: memoryview, end: int, directory: tuple[int, ...]) -> int:
    """Where the directory must stop: PyTorch repeats its numbers in 64 bits between the two."""
    locator = end - _LOCATOR64.size
    at = locator - _END64.size
    if at < 0 or bytes(payload[locator : locator + 4]) != _LOCATOR64_MAGIC:
        return end
    magic, size, _, _, disk, first_disk, *numbers = _END64.unpack_from(payload, at)
    _, on_disk, place, _ = _LOCATOR64.unpack_from(payload, locator)
    alike = (magic, size, place) == (_END64_MAGIC, _END64.size - 12, at)
    if not alike or disk or first_disk or on_disk or tuple(numbers) != directory:
        raise ZipError("has two directories that differ")
    return at


def _entries(directory: memoryview, count: int) -> Iterator[_Entry]:
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(directory):
            raise ZipError("has a directory that is shorter than it says")
        fields = _CENTRAL.unpack_from(directory, at)
        lengths = fields[10:13]
        name_start = at + _CENTRAL.size
        name = bytes(directory[name_start : name_start + lengths[0]])
        yield _entry(name, fields)
        at = name_start + sum(lengths)
    if at != len(directory):
        raise ZipError("has a directory of another length than it says")


def _entry(name: bytes, fields: tuple[Any, ...]) -> _Entry:
    flags, method, packed, size, disk, header = (fields[i] for i in (3, 4, 8, 9, 13, 16))
    shown = printable(name.decode("ascii", "replace"))
    if fields[0] != _CENTRAL_MAGIC or disk or _IN_ZIP64 in (packed, size, header):
        raise ZipError("has a damaged directory, or a record of 4 GiB or more")
    if method != _STORED or packed != size:
        raise ZipError(f"has a compressed record, {shown}")
    if flags & ~_KNOWN_FLAGS:
        raise ZipError(f"has an encrypted or unusual record, {shown}")
    return _Entry(name, header, size)


def _data_start(payload: memoryview, entry: _Entry) -> int:
    names_at = entry.header + _LOCAL.size
    if names_at > len(payload):
        raise ZipError("has a record that begins past its end")
    magic, _, _, method, *_, name_length, extra_length = _LOCAL.unpack_from(payload, entry.header)
    name = bytes(payload[names_at : names_at + name_length])
    if magic != MAGIC or method != _STORED or name != entry.name:
        raise ZipError("has a record whose header differs from the directory")
    return int(names_at + name_length + extra_length)
