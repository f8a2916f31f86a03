"""HEIC pictures: what is decoded, and what is refused before a decoder sees it."""

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from chiasm.heif_boxes import declared
from chiasm.images import FORMATS, ImageError, ImageLimits, decode_image, image_size
from tests.chiasm.heif_files import (
    Item,
    box,
    clap,
    coded,
    full,
    grid,
    heif,
    irot,
    ispe,
    overlay,
    refers,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ODD = Path(__file__).parent.parent / "odd_images"
RED = np.array((200, 30, 30))
Pixels = NDArray[np.uint8]
Measured = dict[str, tuple[list[str | None], int, float]]


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "HEIF", quality=95, chroma=444, **options)
    return file.getvalue()


def photo(width: int = 96, height: int = 64) -> Image.Image:
    across = np.linspace(0, 255, width)[None, :] * np.ones((height, 1))
    down = np.linspace(0, 255, height)[:, None] * np.ones((1, width))
    return Image.fromarray(np.stack([across, down, 255 - across], -1).astype(np.uint8))


def pixels(data: bytes) -> Pixels:
    """Height, width, 3; also holds the header's size against the decoded one."""
    image = decode_image(data)
    assert (image.mode, image.info) == ("RGB", {})
    assert image_size(data) == image.size
    return np.asarray(image)


def distance(one: Pixels, other: Pixels) -> float:
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


def refuse(data: bytes) -> ImageError:
    errors = []
    for read in (image_size, decode_image):
        with pytest.raises(ImageError) as caught:
            read(data)
        errors.append(caught.value)
    assert errors[0].code == errors[1].code
    return errors[1]


# What is decoded

UNDONE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def test_heic_from_the_field_is_decoded_by_its_content() -> None:
    assert "HEIC" in FORMATS
    got = pixels((ODD / "hopper.heif").read_bytes())
    portrait = np.asarray(decode_image((ODD / "hopper_orientation_6.jpg").read_bytes()))
    assert got.shape == (128, 128, 3)
    assert distance(got, portrait) < 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_gives_the_upright_pixels(orientation: int) -> None:
    upright = np.asarray(photo())
    stored = photo() if orientation == 1 else photo().transpose(UNDONE[orientation])
    tags = Image.Exif()
    tags[0x0112] = orientation
    # Given as bytes, it is written as boxes.
    assert distance(pixels(saved(stored, exif=tags.tobytes())), upright) < 3


def test_an_orientation_that_no_box_says_turns_nothing() -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    assert distance(pixels(saved(photo(), exif=tags)), np.asarray(photo())) < 3


def test_turns_are_those_of_the_boxes_and_sizes_are_those_after_turning() -> None:
    hvcc, data = coded(128, 64)
    plain = heif([Item(1, b"hvc1", data, [1, 2])], [hvcc, ispe(128, 64)])
    turned = heif([Item(1, b"hvc1", data, [1, 2, 3])], [hvcc, ispe(128, 64), irot(1)])
    assert pixels(plain).shape == (64, 128, 3)
    assert pixels(turned).shape == (128, 64, 3)


def test_transparent_pixels_show_the_background() -> None:
    image = photo().convert("RGBA")
    mask = np.zeros((64, 96), np.uint8)
    mask[:, :48] = 255
    image.putalpha(Image.fromarray(mask))
    got = pixels(saved(image)).astype(int)
    assert got[:, 64:].min() > 245
    assert distance(pixels(saved(image))[:, :40], np.asarray(photo())[:, :40]) < 3


def test_a_grid_of_tiles_is_one_picture() -> None:
    hvcc, data = coded(64, 64)
    items = [Item(1, b"hvc1", data, [1, 2]), Item(2, b"grid", grid(2, 3, 180, 120), [3])]
    file = heif(items, [hvcc, ispe(64, 64), ispe(180, 120)], [refers(b"dimg", 2, [1] * 6)])
    got = pixels(file)
    assert got.shape == (120, 180, 3)
    assert np.abs(got.astype(int) - RED).max() < 8


def test_of_several_pictures_the_primary_is_taken() -> None:
    hvcc, data = coded(64, 64)
    other, wide = coded(128, 64)
    items = [Item(1, b"hvc1", wide, [3, 4]), Item(2, b"hvc1", data, [1, 2])]
    file = heif(items, [hvcc, ispe(64, 64), other, ispe(128, 64)])
    assert pixels(file).shape == (64, 64, 3)


def test_ten_bits_a_sample_become_eight() -> None:
    wide = np.asarray(photo()).astype(np.uint16) * 257
    pillow_heif = pytest.importorskip("pillow_heif")
    file = io.BytesIO()
    pillow_heif.from_bytes("RGB;16", (96, 64), wide.tobytes()).save(file, quality=95, chroma=444)
    assert distance(pixels(file.getvalue()), np.asarray(photo())) < 3


# What is refused


SIDE = 2048  # four megapixels, where one is allowed
LIMIT = 1_000_000


def hidden(size: bytes) -> bytes:
    """A large picture behind a declared size of 100 x 100."""
    hvcc, data = _large()
    return heif([Item(1, b"hvc1", data, [1, 2, 3])], [hvcc, ispe(SIDE, SIDE), size])


@cache
def _large() -> tuple[bytes, bytes]:
    return coded(SIDE, SIDE)


def tiles(side: int, count: int) -> bytes:
    """One tile of `side` named `count` times in a small grid."""
    hvcc, data = coded(side, side)
    items = [Item(1, b"hvc1", data, [1, 2]), Item(2, b"grid", grid(10, count // 10, 500, 500), [3])]
    references = [refers(b"dimg", 2, [1] * count)]
    return heif(items, [hvcc, ispe(side, side), ispe(500, 500)], references)


def behind(kind: bytes, data: bytes, times: int) -> bytes:
    hvcc, picture = _large()
    items = [Item(1, b"hvc1", picture, [1, 2]), Item(2, kind, data, [3])]
    references = [refers(b"dimg", 2, [1] * times)]
    return heif(items, [hvcc, ispe(SIDE, SIDE), ispe(100, 100)], references)


def nested() -> bytes:
    """Grids of grids of grids: 4,096 tiles of a few bytes each level."""
    hvcc, data = coded(64, 64)
    items = [Item(1, b"hvc1", data, [1, 2])]
    items += [Item(level, b"grid", grid(16, 16, 64, 64), [2]) for level in range(2, 6)]
    references = [refers(b"dimg", level, [level - 1] * 256) for level in range(2, 6)]
    return heif(items, [hvcc, ispe(64, 64)], references)


BOMBS: dict[str, Callable[[], bytes]] = {
    "declared": lambda: heif([Item(1, b"hvc1", b"", [1, 2])], [box(b"hvcC"), ispe(30000, 30000)]),
    "cropped": lambda: hidden(clap(100, 100)),
    "renamed": lambda: behind(b"iden", b"", 1),
    "overlaid": lambda: behind(b"iovl", overlay(50, 100, 100), 50),
    "tiles": lambda: tiles(512, 250),
    "small tiles": lambda: tiles(64, 2550),
    "nested": nested,
}
MEASURE = """
import json, sys, time
from pathlib import Path
from chiasm.images import ImageError, ImageLimits, decode_image, image_size

limits = ImageLimits(max_pixels=int(sys.argv[1]))

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def code(read, data):
    try: read(data, limits)
    except ImageError as error: return error.code

files = {name: bytes.fromhex(text) for name, text in json.load(sys.stdin).items()}
decode_image(files.pop("warm up"))
found = {}
for name, data in files.items():
    before, began = peak(), time.process_time()
    codes = [code(read, data) for read in (image_size, decode_image)]
    found[name] = [codes, peak() - before, time.process_time() - began]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Per file, in a fresh process: codes of reading the size and of decoding, KiB, CPU seconds."""
    files = {"warm up": saved(photo()), **{name: make() for name, make in BOMBS.items()}}
    files["lie"], files["many"] = lie(), many()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(LIMIT)],
        input=json.dumps({name: data.hex() for name, data in files.items()}),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        cwd=ODD.parent.parent,
    )
    found: Measured = json.loads(done.stdout)
    return found


def lie() -> bytes:
    """A large picture that the boxes say is 100 x 100."""
    hvcc, data = _large()
    return heif([Item(1, b"hvc1", data, [1, 2])], [hvcc, ispe(100, 100)])


def many() -> bytes:
    """200 pictures with one profile of 2 MB and one description of 1 MB between them."""
    hvcc, data = coded(64, 64)
    profile = box(b"colr", b"prof", os.urandom(2_000_000))
    items = [Item(number, b"hvc1", data, [1, 2, 3]) for number in range(2, 201)]
    items.insert(0, Item(500, b"Exif", bytes(4) + os.urandom(1_000_000), []))
    references = [refers(b"cdsc", 500, range(2, 201))]
    return heif(items, [hvcc, ispe(64, 64), profile], references)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_from_its_boxes_with_memory_flat(name: str, measured: Measured) -> None:
    codes, growth, seconds = measured[name]
    assert codes == ["image_too_large"] * 2
    assert growth < 4 * 1024
    assert seconds < 1


def test_a_coded_size_above_the_declared_one_is_refused_with_memory_flat(
    measured: Measured,
) -> None:
    codes, growth, seconds = measured["lie"]
    assert codes == [None, "image_parse_error"]
    assert growth < 8 * 1024
    assert seconds < 1


def test_what_other_pictures_of_a_file_have_is_not_read(
    measured: Measured,
) -> None:
    codes, growth, _ = measured["many"]
    assert codes == [None, None]
    assert growth < 40 * 1024  # unhidden it would be 600 MiB


@pytest.mark.parametrize("kind", [b"av01", b"jpeg", b"unci", b"vvc1", b"    "])
def test_another_coding_than_hevc_is_told_to_be_unsupported(kind: bytes) -> None:
    file = heif([Item(1, kind, b"x" * 100, [1])], [ispe(64, 64)])
    error = refuse(file)
    assert error.code == "unsupported_image_media_type"
    assert "HEVC" in error.message


def damaged() -> dict[str, bytes]:
    whole = (ODD / "hopper.heif").read_bytes()
    hvcc, data = coded(64, 64)
    one = Item(1, b"hvc1", data, [1, 2])
    two = heif([one], [hvcc, ispe(64, 64)])
    cyclic = [Item(1, b"grid", grid(1, 1, 64, 64), [1]), Item(2, b"grid", grid(1, 1, 64, 64), [1])]
    return {
        "head alone": whole[:40],
        "half": whole[: len(whole) // 2],
        "no boxes": whole[:24] + bytes(100),
        "two meta": two + two[two.index(b"meta") - 4 :],
        "no size": heif([Item(1, b"hvc1", data, [1])], [hvcc]),
        "cyclic": heif(cyclic, [ispe(64, 64)], [refers(b"dimg", 2, [1]), refers(b"dimg", 1, [2])]),
        "self": heif(cyclic[:1], [ispe(64, 64)], [refers(b"dimg", 1, [1])]),
        "many references": heif([one], [hvcc, ispe(64, 64)], [refers(b"dimg", 9, [1] * 60000)]),
        "many boxes": heif([one], [hvcc, ispe(64, 64), *[box(b"free")] * 30000]),
        "endless box": two.replace(
            struct.pack(">I4s", 20, b"ispe"), struct.pack(">I4s", 7, b"ispe")
        ),
    }


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_file_is_a_parse_error(name: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode_image(damaged()[name])
    assert caught.value.code in {"image_parse_error", "unsupported_image_media_type"}


def test_any_damage_gives_pixels_or_a_typed_error() -> None:
    whole = (ODD / "hopper.heif").read_bytes()
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(300):
        copy = bytearray(whole)
        for at in random.integers(0, len(whole) if random.random() < 0.3 else 800, 4):
            copy[at] = random.integers(256)
        try:
            decode_image(bytes(copy), ImageLimits(max_pixels=1_000_000))
        except ImageError:
            refused += 1
    assert 20 < refused < 300


@given(st.binary(max_size=300), st.sampled_from([b"meta", b"iprp", b"iinf", b"iref", b"ipma"]))
def test_boxes_of_any_bytes_are_read_or_refused(data: bytes, kind: bytes) -> None:
    for file in (data, full(b"meta", 0, 0, box(kind, data))):
        try:
            found = declared(file)
        except (ValueError, LookupError, struct.error):
            continue
        assert found.work >= 0
        assert len(found.alone) == len(file)
