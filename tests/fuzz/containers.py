"""`python -m tests.fuzz.containers --inputs 1000000`: hostile files for the gateway's readers.

Every input is a valid file that was damaged in one place or a few, or pieces of such files put
together as chance has it. Each must end in a sound array or a `ContainerError`, within a second of
processor time. Of every 64th input of a kind the memory is measured too: at most the limit of the
array, three times the input, and 256 KiB. (Each such measurement keeps about a kilobyte itself.) An
input that breaks a rule is printed with what makes it again, and the run ends with status 1.
"""

import argparse
import base64
import io
import json
import random
import resource
import struct
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch

from gateway.containers import (
    ContainerError,
    EmbeddingArray,
    decode_base64,
    embedding,
    integers,
    raw_dtype,
    raw_shape,
    read_array,
    read_raw,
)
from gateway.containers.torch_pickle import read_description

LIMIT: Final = 2**16
SLOWEST_SECONDS: Final = 1.0
SLACK_BYTES: Final = 2**18
MEASURED_EVERY: Final = 64
PROGRESS_EVERY: Final = 50_000
ITEM_SIZE: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
TENSOR: Final = torch.arange(30.0).reshape(5, 6)
NUMBERS: Final = torch.tensor([[1, 4, 6]])
_EXTREMES: Final = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
_WIDTHS: Final = ("<B", "<H", "<I", "<Q", ">I", ">Q")

Chance = random.Random
Read = Callable[[Any], None]


@dataclass(frozen=True)
class Target:
    """A reader, what makes inputs for it, and how many bytes an input has."""

    make: Callable[[Chance], Any]
    read: Read


def torch_file(tensor: object) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def npy_file(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


TORCH_FILES: Final = [
    *(torch_file(TENSOR.to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    torch_file(TENSOR.double()),
    torch_file(TENSOR.t()[1:4, ::2]),
    torch_file(torch.nn.Parameter(TENSOR)),
    torch_file(TENSOR.to_sparse()),
    torch_file({"image_embeds": TENSOR}),
    torch_file([TENSOR, TENSOR]),
]
NPY_FILES: Final = [
    npy_file(TENSOR.numpy()),
    npy_file(np.asfortranarray(TENSOR.numpy())),
    npy_file(TENSOR.numpy().astype(">f8")),
    npy_file(np.array([{"a": 1}], dtype=object)),
]
SAFETENSORS_FILES: Final = [
    safetensors.torch.save({"image_embeds": TENSOR.bfloat16()}),
    safetensors.torch.save({"x": TENSOR}, metadata={"made by": "a test"}),
    safetensors.torch.save({"x": TENSOR, "y": TENSOR.half()}),
]
INTEGER_FILES: Final = [
    torch_file(NUMBERS),
    torch_file(NUMBERS.int()),
    npy_file(NUMBERS.numpy()),
    npy_file(NUMBERS.numpy().astype(">i4")),
    safetensors.torch.save({"grid": NUMBERS}),
]


def _description(payload: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(payload)) as records:
        return records.read("archive/data.pkl")


DESCRIPTIONS: Final = [_description(payload) for payload in TORCH_FILES]
PICKLE_PIECES: Final = [
    *(bytes([code]) for code in b"()tQR.ladu]}NbsKMJXqrhj\x85\x86\x87\x88\x89\x80\x81\x8a\x94\x95"),
    *(
        b"q\0",
        b"h\0",
        b"K\1",
        b"M\1\1",
        b"J\xff\xff\xff\xff",
        b"\x8a\1\x05",
        b"\x8a\x08" + b"\xff" * 8,
    ),
    *(b"X\x07\0\0\0storage", b"X\1\0\0\0000", b"X\3\0\0\0cpu", b"ctorch\nFloatStorage\n"),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"\x80\2"),
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch._utils\n_rebuild_parameter\n"),
    b"(X\x07\0\0\0storageq\1ctorch\nFloatStorage\nq\2X\1\0\0\0000q\3X\3\0\0\0cpuq\4K\x1etQ",
    *(b")\x85", b"K\5K\6\x86", b"K\6K\1\x86", b"\x89ccollections\nOrderedDict\n)R", b"tR."),
]
_HEADER_PIECES: Final = [
    *("{", "}", "'", '"', ":", ",", "(", ")", "[", "]", " ", "\n", "True", "False", "None", "-1"),
    *("'descr'", "'fortran_order'", "'shape'", "'<f4'", "'|O'", "'>f8'", "'<i8'", "(5, 6)", "(5,)"),
    *(
        "'descr': '<f4', ",
        "'fortran_order': False, ",
        "'shape': (5, 6), ",
        "()",
        "(99999999999, 2)",
    ),
]
_JSON_VALUES: Final[Sequence[Any]] = [
    *(
        "F32",
        "BF16",
        "I64",
        "F8_E4M3",
        "",
        "\ud800",
        0,
        1,
        -1,
        2**63,
        2**64,
        1.5,
        1e999,
        True,
        None,
    ),
    *([5, 6], [0, 120], [0, 60], [], [2**62, 2**62], [1] * 9, {}, {"dtype": "F32"}, "x" * 300),
]
_JSON_KEYS: Final = ("dtype", "shape", "data_offsets", "__metadata__", "x", "", "y" * 99, "é")


def damaged(valid: bytes, chance: Chance, others: Sequence[bytes]) -> bytes:
    """`valid` after one change, or a few."""
    payload = bytearray(valid)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        if not payload:
            break
        at = chance.randrange(len(payload))
        match chance.randrange(9):
            case 0:
                payload[at] ^= 1 << chance.randrange(8)
            case 1:
                payload[at] = chance.randrange(256)
            case 2 | 3:
                width = chance.choice(_WIDTHS)
                size = struct.calcsize(width)
                number = chance.choice((*_EXTREMES, len(payload), at)) % (1 << 8 * size)
                payload[at : at + size] = struct.pack(width, number)
            case 4:
                del payload[at : at + chance.randint(1, 32)]
            case 5:
                payload[at:at] = payload[at : at + chance.randint(1, 64)]
            case 6:
                payload[at:at] = chance.randbytes(chance.randint(1, 16))
            case 7:
                del payload[at:]
            case _:
                other = chance.choice(others)
                payload[at:] = other[chance.randrange(len(other)) :]
    return bytes(payload)


def _of(files: Sequence[bytes]) -> Callable[[Chance], bytes]:
    return lambda chance: damaged(chance.choice(files), chance, files)


def _mixed(*makers: Callable[[Chance], Any]) -> Callable[[Chance], Any]:
    return lambda chance: chance.choice(makers)(chance)


def pieces(chance: Chance, of: Sequence[Any], most: int) -> list[Any]:
    return [chance.choice(of) for _ in range(chance.randint(0, most))]


def pickle_text(chance: Chance) -> bytes:
    if chance.random() < 0.4:
        return damaged(chance.choice(DESCRIPTIONS), chance, DESCRIPTIONS)
    return b"\x80\2" * chance.randint(0, 1) + b"".join(pieces(chance, PICKLE_PIECES, 80))


def zip_archive(chance: Chance) -> bytes:
    """Records of chance names and contents, mostly those of a torch file."""
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, 8))
    ) as out:
        for name in pieces(chance, ("data.pkl", "data/0", "version", "byteorder", "x", "../x"), 8):
            content = chance.choice(
                (bytes(120), pickle_text(chance), b"3\n", b"little", b"big", b"", b"\xff" * 9)
            )
            prefix = chance.choice(("archive/", "archive/", "a/", ""))
            if prefix + name not in out.NameToInfo:
                out.writestr(prefix + name, content)
    whole = file.getvalue()
    return whole if chance.random() < 0.5 else damaged(whole, chance, TORCH_FILES)


def npy_of_pieces(chance: Chance) -> bytes:
    header = "".join(pieces(chance, _HEADER_PIECES, 30)).encode()
    length = chance.choice((len(header), len(header), chance.randrange(2**16)))
    version = chance.choice((b"\1\0", b"\2\0", b"\3\0", b"\0\0", b"\1\1"))
    number = struct.pack("<H" if version[0] == 1 else "<I", length)
    return b"\x93NUMPY" + version + number + header + bytes(chance.choice((120, 60, 0, 240)))


def safetensors_of_pieces(chance: Chance) -> bytes:
    def value(depth: int) -> Any:
        if depth and chance.random() < 0.5:
            return {
                chance.choice(_JSON_KEYS): value(depth - 1) for _ in range(chance.randint(0, 4))
            }
        return chance.choice(_JSON_VALUES)

    tensor = {"dtype": "F32", "shape": [5, 6], "data_offsets": [0, 120]}
    for name in list(tensor):
        if chance.random() < 0.3:
            tensor[name] = chance.choice(_JSON_VALUES)
    whole = value(3) if chance.random() < 0.4 else {"x": tensor, **dict(pieces_of_json(chance))}
    header = json.dumps(whole, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        header = b'{"x":' + chance.choice((b"[", b'{"x":', b"-", b"9")) * chance.randrange(50_000)
    length = chance.choice((len(header), len(header), chance.choice(_EXTREMES)))
    return struct.pack("<Q", length) + header + bytes(chance.choice((120, 60, 0)))


def pieces_of_json(chance: Chance) -> Iterator[tuple[str, Any]]:
    for _ in range(chance.randint(0, 2)):
        yield chance.choice(_JSON_KEYS), chance.choice(_JSON_VALUES)


@dataclass(frozen=True)
class Raw:
    """A raw object's fields."""

    data: bytes
    dtype: Any
    shape: Any

    def __len__(self) -> int:
        return len(self.data)


def raw_object(chance: Chance) -> Raw:
    sizes = [chance.choice((0, 1, 2, 5, 6, 30, 2**31, 2**63, -1, 1.0, True, "5", None, [5]))
             for _ in range(chance.randint(0, 6))]  # fmt: skip
    shape: Any = chance.choice((sizes, sizes, [5, 6], [1, 5, 6], "5", None, {}))
    dtypes = ("float32", "float16", "bfloat16", "float64", "int64", "", "x" * 500, None, 4, ["f"])
    return Raw(
        bytes(chance.choice((0, 1, 60, 119, 120, 240, 70_000))), chance.choice(dtypes), shape
    )


def base64_text(chance: Chance) -> str:
    text = base64.b64encode(chance.randbytes(chance.randint(0, 300))).decode()
    for _ in range(chance.randint(0, 6)):
        at = chance.randint(0, len(text))
        junk = chance.choice(
            ("=", "==", "%", "%2B", "%3D", "\r\n", " ", "-", "_", "é", "\0", "%zz")
        )
        text = text[:at] + junk * chance.choice((1, 1, 2, 40)) + text[at + chance.randint(0, 2) :]
    return text


def read_file(payload: bytes) -> None:
    check(read_array(payload, embedding(LIMIT)), LIMIT)


def read_integer_file(payload: bytes) -> None:
    check(read_array(payload, integers(8)), 64)


def read_raw_object(given: Raw) -> None:
    wanted = embedding(LIMIT)
    dtype = raw_dtype(given.dtype, wanted)
    shape = raw_shape(given.shape, dtype, wanted)
    check(read_raw(given.data, dtype, shape, wanted), LIMIT)


def read_pickle(text: bytes) -> None:
    tensor = read_description(text)
    assert len(tensor.shape) == len(tensor.strides)
    assert all(0 <= n < 2**63 for n in (*tensor.shape, *tensor.strides, tensor.offset))


def read_base64(text: str) -> None:
    assert 1 <= len(decode_base64(text, limit_bytes=256)) <= 256


def check(array: EmbeddingArray, limit: int) -> None:
    assert 1 <= len(array.shape) <= 4
    assert min(array.shape) >= 1
    assert array.data.nbytes == prod(array.shape) * ITEM_SIZE[array.dtype] <= limit
    assert array.data.readonly


TARGETS: Final[Mapping[str, Target]] = {
    "torch": Target(_mixed(_of(TORCH_FILES), zip_archive), read_file),
    "pickle": Target(pickle_text, read_pickle),
    "npy": Target(_mixed(_of(NPY_FILES), npy_of_pieces), read_file),
    "safetensors": Target(_mixed(_of(SAFETENSORS_FILES), safetensors_of_pieces), read_file),
    "integers": Target(_of(INTEGER_FILES), read_integer_file),
    "mixed": Target(_of([*TORCH_FILES, *NPY_FILES, *SAFETENSORS_FILES, *INTEGER_FILES]), read_file),
    "raw": Target(raw_object, read_raw_object),
    "base64": Target(base64_text, read_base64),
}


class BrokenRule(Exception):
    """An input that did what none may."""


@dataclass
class Tally:
    """What a run saw of one target."""

    read: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    most_bytes: int = 0
    messages: set[str] = field(default_factory=set)


def try_one(target: Target, payload: Any, tally: Tally, *, measured: bool) -> None:
    """Reads `payload`. Raises BrokenRule, or whatever but ContainerError the reader raised."""
    if measured:
        tracemalloc.start()
    began = time.thread_time()
    try:
        target.read(payload)
        tally.read += 1
    except ContainerError as error:
        tally.refused += 1
        _check_message(error.message)
    finally:
        spent = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
        tracemalloc.stop()
    tally.slowest_seconds = max(tally.slowest_seconds, spent)
    tally.most_bytes = max(tally.most_bytes, peak)
    if spent > SLOWEST_SECONDS:
        raise BrokenRule(f"took {spent:.1f} s")
    if peak > LIMIT + 3 * len(payload) + SLACK_BYTES:
        raise BrokenRule(f"took {peak} bytes for an input of {len(payload)}")


def _check_message(message: str) -> None:
    if not (message.isascii() and message.isprintable() and len(message) < 800):
        raise BrokenRule("has a message that is unfit for the wire")


def made(name: str, seed: int, number: int) -> Any:
    """Input `number` of target `name`; the same at every call."""
    return TARGETS[name].make(random.Random(f"{seed}/{name}/{number}"))


def run(inputs: int, seed: int, names: Sequence[str]) -> dict[str, Tally]:
    """Tries `inputs` inputs, spread over `names`."""
    tallies = {name: Tally() for name in names}
    began = time.monotonic()
    for number in range(inputs):
        name = names[number % len(names)]
        payload = made(name, seed, number)
        measured = number // len(names) % MEASURED_EVERY == 0
        try:
            try_one(TARGETS[name], payload, tallies[name], measured=measured)
        except BaseException:
            print(f"broken by made({name!r}, {seed}, {number}): {payload!r:.2000}", file=sys.stderr)
            raise
        if (number + 1) % PROGRESS_EVERY == 0:
            rate = (number + 1) / (time.monotonic() - began)
            print(f"{number + 1:,} of {inputs:,}, {rate:,.0f} a second", flush=True)
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--targets", nargs="*", choices=list(TARGETS), default=list(TARGETS))
    asked = parser.parse_args()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tallies = run(asked.inputs, asked.seed, asked.targets)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print("| target | read | refused | slowest ms | most KiB of a reading |\n|---|---|---|---|---|")
    for name, seen in tallies.items():
        slowest, most = seen.slowest_seconds * 1000, seen.most_bytes / 1024
        print(f"| {name} | {seen.read:,} | {seen.refused:,} | {slowest:.1f} | {most:.0f} |")
    print(f"largest resident memory grew by {grown / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
