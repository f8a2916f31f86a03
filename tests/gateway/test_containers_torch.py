"""`torch.save` files: what is read, bit for bit, and what is refused before anything is built."""

import copyreg
import io
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.containers import ContainerError, ContainerTooLarge, EmbeddingArray, read_embedding

LIMIT = 2**20
SEED = 7


def saved(value: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def read(payload: bytes) -> EmbeddingArray:
    return read_embedding(payload, limit_bytes=LIMIT)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


def refused(payload: bytes, *words: str) -> str:
    with pytest.raises(ContainerError) as caught:
        read(payload)
    assert caught.value.container in ("torch", "unknown")
    for word in words:
        assert word in caught.value.message
    return caught.value.message


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _number(value: int) -> bytes:
    return (
        b"\x8a"
        + bytes([(size := value.bit_length() // 8 + 1)])
        + value.to_bytes(size, "little", signed=True)
    )


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def described(
    shape: tuple[int, ...] = (3, 4),
    strides: tuple[int, ...] = (4, 1),
    *,
    offset: int = 0,
    count: int = 12,
    key: str = "0",
    location: str = "cpu",
    storage: str = "torch\nFloatStorage",
    rebuild: str = "torch._utils\n_rebuild_tensor_v2",
) -> bytes:
    """The pickle of one tensor, with any number in it."""
    identity = _text("storage") + f"c{storage}\n".encode() + _text(key) + _text(location)
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return (
        f"\x80\x02c{rebuild}\n((".encode("latin-1")
        + identity
        + _number(count)
        + b"tQ"
        + _number(offset)
        + _tuple(shape)
        + _tuple(strides)
        + hooks
        + b"tR."
    )


def archive(
    pickle: bytes,
    others: dict[str, bytes] | None = None,
    *,
    data: bytes = bytes(range(48)),
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """The layout of PyTorch 1.6 to 2.0: no byteorder, no 64-bit directory."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as records:
        records.writestr("archive/data.pkl", pickle)
        records.writestr("archive/data/0", data)
        for name, content in (others or {}).items():
            records.writestr(f"archive/{name}", content)
        records.writestr("archive/version", b"3\n")
    return file.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 8), (1, 3, 8), (2, 1, 3, 4)])
def test_a_saved_tensor_is_read_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    array = read(saved(tensor))
    assert f"torch.{array.dtype}" == str(dtype)
    assert array.shape == shape
    assert bytes(array.data) == raw(tensor)


def test_a_contiguous_tensor_becomes_a_read_only_view_of_the_payload() -> None:
    payload = saved(torch.ones(256, 1024))
    tracemalloc.start()
    array = read(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.data.nbytes == 2**20
    assert array.data.readonly
    assert peak < 2**16


def test_views_are_read_as_their_own_elements() -> None:
    whole = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(SEED))
    views = {
        "transposed": whole.transpose(0, 2),
        "sliced": whole[2:4],
        "stepped": whole[::2, 1:, ::3],
        "offset": whole.view(-1)[17:],
        "expanded": whole[:1].expand(3, 4, 5),
        "overlapping": whole.as_strided((4, 6), (3, 2), 5),
        "one long step": whole.as_strided((1, 5), (2**40, 1), 115),
    }
    for name, view in views.items():
        array = read(saved(view))
        assert array.shape == tuple(view.shape), name
        assert bytes(array.data) == raw(view), name


def test_the_stride_of_an_axis_of_one_element_may_be_any_number() -> None:
    array = read(archive(described((1, 12), (2**62, 1))))
    assert bytes(array.data) == bytes(range(48))


def test_no_array_can_be_written_to() -> None:
    payload = bytearray(saved(torch.ones(4, 6)))
    assert read_embedding(memoryview(payload), limit_bytes=LIMIT).data.readonly
    assert read(saved(torch.ones(4, 6).t())).data.readonly


def test_parameters_and_tensors_that_require_gradients_are_read() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    for tensor in (parameter, torch.arange(6.0).reshape(2, 3).requires_grad_()):
        assert bytes(read(saved(tensor)).data) == raw(tensor)


def test_a_file_saved_under_a_name_of_its_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bild é.v2.pt"
    torch.save(torch.ones(2, 3), path)
    assert read(path.read_bytes()).shape == (2, 3)


def test_float64_is_rounded_to_float32_and_refused_where_it_would_overflow() -> None:
    wide = torch.tensor([[1 / 3, float("inf"), float("nan")]], dtype=torch.float64)
    array = read(saved(wide))
    assert array.dtype == "float32"
    assert bytes(array.data) == raw(wide.float())
    refused(saved(torch.tensor([1e39], dtype=torch.float64)), "float32's range")


def test_the_older_layout_is_read_and_any_device_tag_is_accepted() -> None:
    for location in ("cpu", "cuda:0", "mps", "xpu:3"):
        array = read(archive(described(location=location)))
        assert (array.dtype, array.shape) == ("float32", (3, 4))
        assert bytes(array.data) == bytes(range(48))


def test_a_storage_may_have_any_number_as_its_key() -> None:
    key = "94022339887104"  # PyTorch 1.6 numbers storages by their addresses
    payload = archive(described(key=key), {f"data/{key}": bytes(range(100, 148))})
    assert bytes(read(payload).data) == bytes(range(100, 148))


def test_big_endian_files_are_turned() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    swapped = values.numpy().astype(">f4").tobytes()
    payload = archive(described(), {"byteorder": b"big"}, data=swapped)
    assert bytes(read(payload).data) == raw(values)
    refused(archive(described(), {"byteorder": b"middle"}), "byte order")


def test_a_newer_format_version_is_refused() -> None:
    refused(archive(described(), {".format_version": b"11"}), "newer version")


class Marked(torch.Tensor):
    """A subclass, to be refused."""


def _with_attribute() -> torch.Tensor:
    tensor = torch.ones(2, 3)
    tensor.note = "x"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(2, 3).to(torch.float8_e4m3fn), "float8"),
        (torch.ones(2, 3, device="meta"), "meta"),
        (torch.ones(2, 3).as_subclass(Marked), "subclass"),
        (_with_attribute(), "attributes"),
        ({"image_embeds": torch.ones(2, 3)}, "a dict"),
        (torch.nn.Linear(2, 2).state_dict(), "a dict"),
        ([torch.ones(2, 3)], "a list"),
        ((torch.ones(2, 3), torch.ones(2, 3)), "a tuple"),
        (torch.ones(2, 3).untyped_storage(), "storage"),
        (torch.ones(2, 3).numpy(), "NumPy"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (3, "a number"),
        (True, "a number"),
        ("text", "a text"),
        (None, "None"),
        (2.5, "a float"),
        (torch.ones(2, 3, dtype=torch.int64), "int64"),
        (torch.ones(2, 3, dtype=torch.int8), "int8"),
        (torch.ones(2, 3, dtype=torch.bool), "bool"),
        (torch.ones(2, 3, dtype=torch.complex64), "complex64"),
        (torch.ones(()), "scalar"),
        (torch.ones(0, 4), "empty"),
        (torch.ones(1, 1, 1, 2, 3), "5 axes"),
    ],
)
def test_everything_else_is_refused_by_name(value: object, found: str) -> None:
    assert ";" in refused(saved(value), found)  # what was found; how to mend it


def test_other_protocols_and_the_format_before_zip_are_refused_by_name() -> None:
    tensor = torch.ones(2, 3)
    refused(saved(tensor, pickle_protocol=4), "protocol")
    refused(saved(tensor, _use_new_zipfile_serialization=False), "before PyTorch 1.6")


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickled_call_is_never_made(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    refused(saved(Bomb(marker)), f"{os.mkdir.__module__}.mkdir")
    refused(saved({"image_embeds": Bomb(marker)}), "a dict")
    assert not marker.exists()


@pytest.mark.parametrize("opcode", [b"i", b"o", b"b", b"\x81", b"\x92", b"\x93", b"\x82", b"P"])
def test_opcodes_that_build_or_name_objects_are_unknown(opcode: bytes) -> None:
    refused(archive(b"\x80\x02" + opcode + b"os\nsystem\n."), "the torch file holds")


def test_a_registered_extension_code_is_not_looked_up() -> None:
    copyreg.add_extension("os", "mkdir", 240)
    try:
        refused(archive(b"\x80\x02\x82\xf0."), "opcode")
    finally:
        copyreg.remove_extension("os", "mkdir", 240)


def test_a_small_sparse_file_of_terabytes_is_refused_without_allocation() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0], [0]]), torch.ones(1), (2**20, 2**20), check_invariants=True
    )
    payload = saved(sparse)
    assert len(payload) < 3000
    tracemalloc.start()
    refused(payload, "sparse")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2**20, 2**20), (2**20, 1)),
        ((2**20, 2**20), (0, 0)),  # in bounds, as an expanded single element
        ((2**62, 2**62), (0, 0)),  # the product wraps to 0 in 64 bits
        ((512, 513), (0, 1)),
    ],
)
def test_a_size_beyond_the_limit_is_told_from_the_header(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    tracemalloc.start()
    with pytest.raises(ContainerTooLarge, match="limit"):
        read(archive(described(shape, strides)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18


def test_the_limit_is_that_of_the_tensor_read_and_is_exact() -> None:
    payload = saved(torch.ones(1024, 4)[:2])
    assert read_embedding(payload, limit_bytes=32).shape == (2, 4)
    with pytest.raises(ContainerTooLarge):
        read_embedding(payload, limit_bytes=31)


@pytest.mark.parametrize(
    ("pickle", "found"),
    [
        (described(offset=1), "element 12 of 12"),
        (described((3, 5)), "element 12 of 12"),
        (described((3, 4), (2**62, 1)), "reaches element"),
        (described((3, 4), (-4, 1), offset=8), "negative"),
        (described((-3, -4)), "negative"),
        (described(offset=-1), "negative"),
        (described((3, 4), (4,)), "2 sizes and 1 strides"),
        (described(count=13), "48 bytes for a storage of 52"),
        (described((2, 4), count=8), "48 bytes for a storage of 32"),
        (described(count=2**70), "64 bits"),
        (described(count=-12), "damaged"),
        (described(key="1"), "without its storage"),
        (described(key="../../0"), "damaged"),
        (described(location="x" * 1000), "a long text"),
        (described(storage="torch\nDoubleStorage"), "48 bytes for a storage of 96"),
        (described(storage="builtins\neval"), "builtins.eval"),
        (described(rebuild="torch._utils\n_rebuild_tensor"), "older than 1.6"),
        (described(rebuild="collections\nOrderedDict"), "damaged"),
        (described() + b".", "damaged"),
        (described()[:-1], "damaged"),
        (b"", "damaged"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02h\x00.", "damaged"),
        (b"\x80\x02X\x02\x00\x00\x00\xff\xff.", "damaged"),
        (b"\x80\x02c" + b"a" * 300 + b"\n.", "damaged"),
        (b"\x80\x02" + b")" * 10_000, "longer than that of one tensor"),
        (b"\x80\x02)" + b"\x85q\x00h\x00\x86" * 80, "longer than that of one tensor"),
    ],
)
def test_a_description_that_does_not_fit_its_storage_is_refused(pickle: bytes, found: str) -> None:
    refused(archive(pickle), found)


def test_names_from_the_file_are_repeated_short_and_printable() -> None:
    message = refused(archive(b"\x80\x02cos\x1b[31m\xc3\xa9" + b"n" * 99 + b"\nf\n."))
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 250


def test_a_compressed_archive_is_refused() -> None:
    refused(archive(described(), compression=zipfile.ZIP_DEFLATED), "compressed")


def _with_directory_field(payload: bytes, name: bytes, at: int, value: bytes) -> bytes:
    entry = payload.rindex(name) - 46  # the directory comes last in the file
    return payload[: entry + at] + value + payload[entry + at + len(value) :]


@pytest.mark.parametrize(
    ("at", "value", "found"),
    [
        (8, b"\x01\x00", "encrypted"),
        (10, b"\x0c\x00", "compressed"),
        (20, struct.pack("<I", 47), "compressed"),
        (20, struct.pack("<II", 2**31, 2**31), "runs past"),
        (20, struct.pack("<II", 2**32 - 1, 2**32 - 1), "4 GiB"),
        (34, b"\x01\x00", "damaged"),
        (42, struct.pack("<I", 0), "one place"),
        (42, struct.pack("<I", 2**31), "begins past"),
        (42, struct.pack("<I", 5), "one place"),
        (28, b"\xff\xff", "directory"),
    ],
)
def test_a_directory_entry_that_lies_is_refused(at: int, value: bytes, found: str) -> None:
    payload = archive(described())
    refused(_with_directory_field(payload, b"archive/data/0", at, value), found)


def test_records_of_one_name_and_records_inside_others_are_refused() -> None:
    twice = archive(described(), {"data/1": b"x"}).replace(b"data/1", b"data/0")
    refused(twice, "of one name")
    inner = archive(described(), data=archive(described())[:48])
    hidden = inner.index(b"PK\x03\x04", inner.index(b"archive/data/0"))
    moved = _with_directory_field(inner, b"archive/data/0", 42, struct.pack("<I", hidden))
    refused(moved, "zip archive")


def test_a_record_that_reaches_into_the_directory_is_refused() -> None:
    payload = archive(described())
    longer = struct.pack("<II", 10, 10)
    refused(_with_directory_field(payload, b"archive/version", 20, longer), "runs past")


def test_a_record_named_otherwise_than_in_the_directory_is_refused() -> None:
    refused(archive(described()).replace(b"data/0", b"data/9", 1), "differs from the directory")


def test_bytes_between_the_directory_and_its_end_are_refused() -> None:
    payload = archive(described())
    refused(payload[:-22] + b"\0" + payload[-22:], "contradicts itself")


def test_two_directories_that_differ_are_refused() -> None:
    payload = bytearray(saved(torch.ones(2, 3)))
    at = payload.rindex(b"PK\x06\x06")
    payload[at + 24] += 1  # the count of records in the 64-bit directory
    refused(bytes(payload), "differ")


def test_bytes_around_the_archive_are_refused() -> None:
    payload = saved(torch.ones(2, 3))
    refused(payload + b"\0", "after it")
    refused(b"PK\x03\x04" + payload, "zip archive")


def test_archives_of_something_else_are_refused_by_name() -> None:
    refused(archive(described(), {"constants.pkl": b"\x80\x02)."}), "TorchScript")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as records:
        records.writestr("readme.txt", "hello")
    refused(other.getvalue(), "readme.txt")
    many = archive(described(), {f"data/{i}": b"" for i in range(1, 2000)})
    refused(many, "records")
