import io
import json
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from chiasm.images import PILLOW_MAX_PIXELS, ImageError, ImageLimits, decode_image, image_size

# The test runner undoes the filter that chiasm.images sets at import.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ODD = Path(__file__).parent.parent / "odd_images"
RED, GREEN, BLUE, MAGENTA, WHITE = (
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 0, 255),
    (255, 255, 255),
)
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def save(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(data: bytes, limits: ImageLimits | None = None) -> NDArray[np.uint8]:
    """height, width, 3; also holds the header's size against the decoded one."""
    limits = limits or ImageLimits()
    image = decode_image(data, limits)
    assert image.mode == "RGB" and image.info == {}
    assert image_size(data, limits) == image.size
    return np.asarray(image)


def refuse(data: bytes | memoryview, limits: ImageLimits | None = None) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decode_image(data, limits or ImageLimits())
    error = caught.value
    expected = "IMAGE_TOO_LARGE" if error.code.endswith("too_large") else "IMAGE_INVALID"
    assert error.reason == expected
    assert error.message == str(error)
    return error


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG from raw rows (each led by its filter byte); `extra` chunks stand before IDAT."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + b"".join(extra) + chunk(b"IDAT", zlib.compress(rows))
    return PNG_MAGIC + body + chunk(b"IEND", b"")


def photo(width: int = 48, height: int = 32) -> Image.Image:
    """Smooth, asymmetric, so that a turn, a flip or an inversion shows."""
    across = np.linspace(0, 255, width)[None, :] * np.ones((height, 1))
    down = np.linspace(0, 255, height)[:, None] * np.ones((1, width))
    return Image.fromarray(np.stack([across, down, 255 - across], -1).astype(np.uint8))


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


# ---- orientation


def test_a_phone_photo_stands_upright() -> None:
    stored = Image.new("RGB", (24, 16), GREEN)
    stored.paste(RED, (0, 0, 12, 16))
    upright = decode_image(save(stored, "JPEG", quality=100, subsampling=0, exif=exif(6)))
    assert upright.size == (16, 24)
    rows = np.asarray(upright).astype(int)
    assert np.abs(rows[:12] - RED).max() <= 2
    assert np.abs(rows[12:] - GREEN).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_every_orientation_gives_the_upright_pixels(kind: str, orientation: int) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    plain = Image.fromarray(pixels(save(photo(), kind, **options)))
    turned = ImageOps.exif_transpose(_with_orientation(plain, orientation))
    data = save(photo(), kind, exif=exif(orientation), **options)
    assert np.array_equal(pixels(data), np.asarray(turned))


def _with_orientation(image: Image.Image, orientation: int) -> Image.Image:
    copy = image.copy()
    copy.getexif()[0x0112] = orientation
    return copy


def test_avif_turns_by_its_container_boxes() -> None:
    data = save(photo(), "AVIF", quality=100, subsampling="4:4:4", exif=exif(6))
    expected = np.asarray(photo().transpose(Image.Transpose.ROTATE_270)).astype(int)
    assert np.abs(pixels(data).astype(int) - expected).max() <= 4


def test_a_portrait_stored_sideways_counts_by_its_turned_size() -> None:
    data = save(Image.new("RGB", (200, 100)), "JPEG", exif=exif(6))
    assert image_size(data) == decode_image(data).size == (100, 200)


def test_a_real_sideways_photo_is_turned() -> None:
    data = (ODD / "hopper_orientation_6.jpg").read_bytes()
    stored = Image.open(io.BytesIO(data)).convert("RGB")
    expected = stored.transpose(Image.Transpose.ROTATE_270)
    assert np.array_equal(pixels(data), np.asarray(expected))


def test_png_orientation_counts_even_after_the_pixels() -> None:
    plain = save(photo(), "PNG")
    late = plain[:-12] + chunk(b"eXIf", exif(8).tobytes().removeprefix(b"Exif\0\0")) + plain[-12:]
    expected = photo().transpose(Image.Transpose.ROTATE_90)
    assert np.array_equal(pixels(late), np.asarray(expected))


def test_orientation_from_xmp_counts() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="3"/></x:xmpmeta>'
    expected = pixels(save(photo(), "JPEG"))[::-1, ::-1]
    assert np.array_equal(pixels(save(photo(), "JPEG", xmp=xmp)), expected)


@pytest.mark.parametrize(
    "tags", [b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f"]
)
def test_damaged_metadata_leaves_the_picture_as_stored(tags: bytes) -> None:
    data = save(photo(), "JPEG", exif=tags)
    assert np.array_equal(pixels(data), pixels(save(photo(), "JPEG")))


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_orientations_outside_the_standard_turn_nothing(value: int) -> None:
    assert decode_image(save(photo(), "JPEG", exif=exif(value))).size == photo().size


# ---- transparency


def half_clear() -> Image.Image:
    """2x2: the left column alpha 0 over magenta, the right opaque blue."""
    image = Image.new("RGBA", (2, 2), (*BLUE, 255))
    image.paste((*MAGENTA, 0), (0, 0, 1, 2))
    return image


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "AVIF", "ICO"])
def test_colours_hidden_under_transparency_never_show(kind: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "WEBP": {"lossless": True, "exact": True},
        "AVIF": {"subsampling": "4:4:4"},
    }
    image = half_clear().resize((16, 16), Image.Resampling.NEAREST)
    data = save(image, kind, **options.get(kind, {}))
    got = pixels(data).astype(int)
    assert np.abs(got[:, 0] - WHITE).max() <= 6
    assert np.abs(got[:, -1] - BLUE).max() <= 6


def test_the_background_is_the_operators_choice() -> None:
    got = pixels(save(half_clear(), "PNG"), ImageLimits(background=(10, 20, 30)))
    assert got[0, 0].tolist() == [10, 20, 30] and got[0, 1].tolist() == [0, 0, 255]


def test_half_alpha_mixes_in_proportion() -> None:
    got = pixels(save(Image.new("RGBA", (1, 1), (0, 0, 0, 128)), "PNG"))
    assert got[0, 0].tolist() == [127, 127, 127]


def test_the_same_picture_decodes_alike_from_every_kind_of_transparency() -> None:
    """Left column clear, right column grey 90: as alpha, palette alpha and colour keys."""
    grey = bytes([0, 255, 90]) * 2
    key16 = b"\x00\xff\x00\xff\x00\xff"
    rgb_row = bytes([0]) + b"\xff\xff\xff" + b"\x5a\x5a\x5a"
    palette = chunk(b"PLTE", b"\xff\x00\xff\x5a\x5a\x5a")
    files = {
        "RGBA": png(2, 2, 8, 6, (bytes([0, 9, 9, 9, 0]) + bytes([90, 90, 90, 255])) * 2),
        "LA": png(2, 2, 8, 4, bytes([0, 7, 0, 90, 255]) * 2),
        "LA16": png(2, 2, 16, 4, bytes([0, 7, 7, 0, 0, 90, 90, 255, 255]) * 2),
        "P one clear entry": png(2, 2, 8, 3, bytes([0, 0, 1]) * 2, palette, chunk(b"tRNS", b"\0")),
        "P alpha table": png(2, 2, 8, 3, bytes([0, 0, 1]) * 2, palette, chunk(b"tRNS", b"\0\xfe")),
        "RGB key": png(2, 2, 8, 2, rgb_row * 2, chunk(b"tRNS", key16)),
        "L key": png(2, 2, 8, 0, grey, chunk(b"tRNS", b"\x00\xff")),
        "L16 key": png(2, 2, 16, 0, bytes([0, 9, 9, 90, 90]) * 2, chunk(b"tRNS", b"\x09\x09")),
        "RGB16 key": png(
            2,
            2,
            16,
            2,
            (b"\0" + b"\x08\x09" * 3 + b"\x5a\x00" * 3) * 2,
            chunk(b"tRNS", b"\x08\x09" * 3),
        ),
    }
    expected = [[[255] * 3, [90] * 3]] * 2
    for name, data in files.items():
        got = pixels(data).astype(int)
        assert np.abs(got - expected).max() <= (1 if name == "P alpha table" else 0), name


@pytest.mark.parametrize(
    ("depth", "key", "other"), [(1, 0, 255), (1, 1, 0), (2, 1, 170), (4, 5, 170), (8, 85, 170)]
)
def test_grey_colour_keys_count_in_the_files_own_depth(depth: int, key: int, other: int) -> None:
    """Two samples a row: the key, then `other` (given on the 8-bit scale)."""
    top = 2**depth - 1
    row = (
        (key << 8 - depth | (other * top // 255) << 8 - 2 * depth).to_bytes(1)
        if depth < 8
        else (bytes([key, other]))
    )
    got = pixels(png(2, 1, depth, 0, b"\0" + row, chunk(b"tRNS", struct.pack(">H", key))))
    assert got[0].tolist() == [[255] * 3, [other] * 3]


def test_palette_and_colour_key_files_from_the_field_are_composited() -> None:
    by_palette = pixels((ODD / "p_trns_single.png").read_bytes())
    by_key = pixels((ODD / "rgb_trns.png").read_bytes())
    assert np.array_equal(by_palette, by_key)
    assert by_key[32, 32].tolist() == [255, 255, 255]
    assert pixels((ODD / "i_trns.png").read_bytes())[32, 32].tolist() == [255, 255, 255]


# ---- animations and several pictures


def moving_gif(**options: Any) -> bytes:
    frames = [Image.new("RGB", (6, 4), colour) for colour in (RED, GREEN, BLUE)]
    return save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50, **options)


@pytest.mark.parametrize("disposal", [0, 1, 2, 3])
def test_an_animated_gif_is_its_first_frame(disposal: int) -> None:
    data = moving_gif(disposal=disposal, loop=0)
    assert all((pixels(data) == RED).all() for _ in range(3))


@pytest.mark.parametrize("kind", ["WEBP", "PNG", "AVIF", "TIFF"])
def test_every_animated_or_paged_container_gives_its_first_picture(kind: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    data = save(frames[0], kind, save_all=True, append_images=frames[1:])
    assert np.abs(pixels(data).astype(int) - RED).max() <= 8


def test_an_mpo_is_its_first_jpeg_turned() -> None:
    second = Image.new("RGB", (48, 32), BLUE)
    first = save(photo(), "JPEG", exif=exif(6))
    data = save(photo(), "MPO", save_all=True, append_images=[second], exif=exif(6))
    assert np.array_equal(pixels(data), pixels(first))


def small_gif(frame: tuple[int, int, int, int], *, clear: bool) -> bytes:
    """A 4x4 canvas, palette (green, red), one frame of red at (left, top, width, height)."""
    control = b"!\xf9\x04" + bytes([8 | clear, 0, 0, 0]) + b"\0"
    whole = Image.new("P", frame[2:], 1)
    whole.putpalette([0, 255, 0, 255, 0, 0])
    encoded = save(whole, "GIF", optimize=False)
    image_at = encoded.rindex(b",\0\0\0\0")
    start = struct.pack("<HHBBB", 4, 4, encoded[10], 0, 0)
    descriptor = b"," + struct.pack("<4H", *frame)
    palette_end = 13 + (3 << (encoded[10] & 7) + 1)
    return (
        b"GIF89a" + start + encoded[13:palette_end] + control + descriptor + encoded[image_at + 9 :]
    )


@pytest.mark.parametrize("clear", [False, True])
def test_what_the_first_frame_leaves_bare_is_background(clear: bool) -> None:
    got = pixels(small_gif((1, 1, 2, 2), clear=clear))
    expected = np.full((4, 4, 3), 255)
    expected[1:3, 1:3] = RED
    assert np.array_equal(got, expected)


def test_a_frame_beyond_the_canvas_widens_it_within_the_limits() -> None:
    data = small_gif((2, 2, 4, 4), clear=False)
    assert decode_image(data).size == (6, 6)
    assert refuse(data, ImageLimits(max_pixels=20)).code == "image_too_large"


def test_disposal_of_the_first_frame_does_not_reach_it() -> None:
    image = decode_image((ODD / "dispose_bgnd_transparency.gif").read_bytes())
    assert image.size == (38, 32)
    assert (np.asarray(image)[:, 27:] == 255).all()


# ---- colour


def test_a_cmyk_jpeg_is_neither_inverted_nor_refused() -> None:
    got = pixels((ODD / "pil_sample_cmyk.jpg").read_bytes()).astype(int)
    assert got.shape == (100, 100, 3)
    ours = save(photo().convert("CMYK"), "JPEG", quality=95)
    assert np.abs(pixels(ours).astype(int) - np.asarray(photo()).astype(int)).mean() < 6


def test_the_adobe_cmyk_sample_has_the_colours_of_its_rgb_reading() -> None:
    """Ink amounts by hand: the file stores them inverted, so stored/255 is what stays unprinted."""
    data = (ODD / "pil_sample_cmyk.jpg").read_bytes()
    inks = np.asarray(Image.open(io.BytesIO(data))).astype(float)
    expected = (255 - inks[..., :3]) * (255 - inks[..., 3:]) / 255
    assert np.abs(pixels(data) - expected).max() <= 2
    assert pixels(data)[0, 0].tolist() == [255, 13, 25]  # red lettering
    assert pixels(data)[-1, -1].max() < 10  # on black


@pytest.mark.parametrize("kind", ["TIFF", "PNG"])
def test_sixteen_bit_grey_keeps_its_high_byte(kind: str) -> None:
    samples = np.array([[0, 255, 256, 0x5A5A, 0x8000, 0xFFFF]], dtype=np.uint16)
    got = pixels(save(Image.fromarray(samples), kind))
    assert got[0, :, 0].tolist() == [0, 0, 1, 0x5A, 0x80, 255]


def test_sixteen_bit_grey_and_sixteen_bit_colour_agree() -> None:
    samples = np.array([0, 1000, 30000, 65535], dtype=">u2")
    grey = png(4, 1, 16, 0, b"\0" + samples.tobytes())
    colour = png(4, 1, 16, 2, b"\0" + np.repeat(samples, 3).tobytes())
    assert np.array_equal(pixels(grey), pixels(colour))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 90.0, 255.0]], np.float32), [0, 90, 255]),
        (np.array([[-10.0, 0.0, 10.0]], np.float32), [0, 128, 255]),
        (np.array([[np.nan, 0.0, 1.0]], np.float32), [0, 0, 255]),
        (np.array([[-7.0, -7.0, -7.0]], np.float32), [0, 0, 0]),
        (np.array([[0, 90, 255]], np.int32), [0, 90, 255]),
        (np.array([[0, 256, 65535]], np.int32), [0, 1, 255]),
        (np.array([[-100, 0, 100]], np.int32), [0, 128, 255]),
    ],
)
def test_floats_and_wide_integers_take_the_narrowest_customary_range(
    samples: NDArray[Any], expected: list[int]
) -> None:
    assert pixels(save(Image.fromarray(samples), "TIFF"))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.finfo(np.float32).max])
def test_infinite_samples_do_not_break_the_decoder(value: float) -> None:
    samples = np.array([[value, 0.0, 1.0]], np.float32)
    assert pixels(save(Image.fromarray(samples), "TIFF")).shape == (1, 3, 3)


def test_palette_grey_and_bilevel_files_become_rgb() -> None:
    ramp = Image.fromarray(np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4))
    assert np.array_equal(pixels(save(ramp, "PNG"))[..., 1], np.asarray(ramp))
    assert np.array_equal(pixels(save(ramp.convert("P"), "PNG"))[..., 2], np.asarray(ramp))
    bilevel = ramp.point(lambda value: 255 if value > 100 else 0).convert("1")
    got = pixels(save(bilevel, "PNG"))[..., 0]
    assert np.array_equal(got, np.asarray(bilevel.convert("L")))


def swapped_profile() -> bytes:
    """sRGB whose red and green primaries change places: a conversion cannot go unseen."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = struct.unpack_from(">I", profile, 128)[0]
    at = {bytes(profile[132 + 12 * tag : 136 + 12 * tag]): 132 + 12 * tag for tag in range(count)}
    profile[at[b"rXYZ"] : at[b"rXYZ"] + 4], profile[at[b"gXYZ"] : at[b"gXYZ"] + 4] = (
        b"gXYZ",
        b"rXYZ",
    )
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_pixels_in_another_colour_space_become_srgb(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = save(Image.new("RGB", (4, 4), RED), kind, icc_profile=swapped_profile(), **options)
    assert np.abs(pixels(data).astype(int) - GREEN).max() <= 2


def test_transparent_pixels_are_converted_before_they_meet_the_background() -> None:
    image = Image.new("RGBA", (1, 1), (*RED, 255))
    data = save(image, "PNG", icc_profile=swapped_profile())
    got = pixels(data, ImageLimits(background=RED))
    assert np.abs(got.astype(int) - GREEN).max() <= 2


def test_an_srgb_profile_changes_no_pixel() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = save(photo(), "PNG", icc_profile=profile)
    assert np.array_equal(pixels(data), np.asarray(photo()))


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "P", "1", "I;16", "CMYK"])
@pytest.mark.parametrize("profile", [b"junk" * 50, swapped_profile()[:200], swapped_profile()])
def test_a_profile_that_is_broken_or_does_not_fit_is_ignored(mode: str, profile: bytes) -> None:
    if mode in ("RGB", "P") and len(profile) > 200:
        return  # here it fits
    image = photo().convert("L").convert(mode) if mode != "CMYK" else photo().convert(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert np.array_equal(pixels(save(image, kind, icc_profile=profile)), pixels(save(image, kind)))


# ---- formats


@pytest.mark.parametrize("options", [{"quality": 90}, {"lossless": True}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_webp_is_served_lossy_lossless_and_with_alpha(mode: str, options: dict[str, Any]) -> None:
    image = Image.new("RGB", (8, 8), RED).convert(mode)
    assert np.abs(pixels(save(image, "WEBP", **options)).astype(int) - RED).max() <= 4


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "ICO", "GIF", "JPEG", "AVIF"])
def test_the_content_decides_the_format(kind: str) -> None:
    image = photo(32, 32)
    got = pixels(save(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
    allowed = {"GIF": 60, "JPEG": 40, "AVIF": 40}.get(kind, 0)
    assert np.abs(got.astype(int) - np.asarray(image)).max() <= allowed


def test_avif_from_the_field_is_decoded() -> None:
    got = pixels((ODD / "hopper.avif").read_bytes()).astype(int)
    same_portrait = pixels((ODD / "hopper_orientation_6.jpg").read_bytes()).astype(int)
    assert got.shape == (128, 128, 3)
    assert np.abs(got - same_portrait).mean() < 12


@pytest.mark.parametrize("sizes", [[(16, 16)], [(16, 16), (48, 48), (256, 256)]])
@pytest.mark.parametrize("bitmap", ["png", "bmp"])
def test_an_icon_is_its_largest_entry(sizes: list[tuple[int, int]], bitmap: str) -> None:
    image = half_clear().resize((256, 256), Image.Resampling.NEAREST)
    got = pixels(save(image, "ICO", sizes=sizes, bitmap_format=bitmap))
    assert got.shape[:2] == sizes[-1]
    assert got[0, 0].tolist() == [255, 255, 255] and got[-1, -1].tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<!DOCTYPE svg>\n<SVG></SVG>", "SVG"),
        ("<svg></svg>".encode("utf-16"), "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        (b"8BPS\0\1", "Photoshop"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0isom", "video"),
        (b"RIFF\0\0\0\0AVI LIST", "RIFF"),
        (b"P6\n1 1\n255\n\0\0\0", "Netpbm"),
        (b"\0\0\2\0\1\0" + bytes(40), "CUR"),
        (b"qoif" + bytes(20), "QOI"),
    ],
)
def test_formats_that_are_not_served_are_refused_by_name(data: bytes, name: str) -> None:
    error = refuse(data)
    assert error.code == "unsupported_image_media_type"
    assert name in error.message and "PNG" in error.message
    with pytest.raises(ImageError):
        image_size(data)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"Hello World", "plain text"),
        (b"MZ\x90\0\3\0\0\0", "program"),
        (b"<!DOCTYPE html><html><svg/></html>", "HTML"),
        (b"PK\3\4rest", "ZIP"),
        (b"data:image/png;base64,AAAA", "data URL"),
        (bytes(64), "no image signature"),
        (b"\xff", "no image signature"),
    ],
)
def test_what_is_no_image_is_said_to_be_none(data: bytes, name: str) -> None:
    error = refuse(data)
    assert error.code == "image_parse_error"
    assert name in error.message


def test_no_bytes_are_an_empty_file() -> None:
    assert refuse(b"").code == "empty_image_file"
    assert refuse(memoryview(b"")).code == "empty_image_file"


def test_an_svg_reaches_no_socket_and_no_file() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        entity = f"http://127.0.0.1:{server.getsockname()[1]}/x".encode()
        svg = b'<!DOCTYPE svg [<!ENTITY e SYSTEM "' + entity + b'">]><svg><text>&e;</text></svg>'
        assert refuse(svg).code == "unsupported_image_media_type"
        with pytest.raises(TimeoutError):
            server.accept()


# ---- limits


def test_too_many_bytes_are_refused_before_they_are_looked_at() -> None:
    data = save(photo(), "PNG")
    assert refuse(data, ImageLimits(max_bytes=len(data) - 1)).code == "image_file_too_large"
    assert refuse(bytes(1000), ImageLimits(max_bytes=999)).code == "image_file_too_large"
    assert pixels(data, ImageLimits(max_bytes=len(data))).shape == (32, 48, 3)


@pytest.mark.parametrize(
    "kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "ICO", "HEIF"]
)
def test_pixels_and_sides_are_limited_in_every_format(kind: str) -> None:
    data = save(photo(32, 32), kind)
    decode_image(data, ImageLimits(max_pixels=1024, max_side=32))
    for limits in (ImageLimits(max_pixels=1023), ImageLimits(max_side=31)):
        assert refuse(data, limits).code == "image_too_large"
        with pytest.raises(ImageError):
            image_size(data, limits)


def test_limits_that_pillow_would_undercut_are_refused() -> None:
    assert Image.MAX_IMAGE_PIXELS == PILLOW_MAX_PIXELS
    for wrong in (
        {"max_pixels": PILLOW_MAX_PIXELS + 1},
        {"max_pixels": 0},
        {"max_bytes": 0},
        {"max_side": 0},
        {"background": (0, 0, 256)},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ImageLimits(**wrong)


def webp_canvas(width: int, height: int) -> bytes:
    body = b"VP8X\x0a\0\0\0\x10\0\0\0" + (width - 1).to_bytes(3, "little")
    body += (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def gif_frame(canvas: int, frame: int) -> bytes:
    """Disposal 2, for which Pillow fills a buffer of the frame's size while opening."""
    head = b"GIF89a" + struct.pack("<HHBBB", canvas, canvas, 0x80, 0, 0) + bytes(6)
    control = b"!\xf9\x04\x09\0\0\0\0"
    image = b"," + struct.pack("<4HB", 0, 0, frame, frame, 0) + b"\x02\x02\x4c\x01\x00;"
    return head + control + image


def icon(width: int, height: int) -> bytes:
    body = png(width, height, 8, 6, b"")
    return struct.pack("<3H4B2H2I", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(body), 22) + body


def huge_tile() -> bytes:
    tags = [
        (256, 4, 8),
        (257, 4, 8),
        (258, 3, 8),
        (259, 3, 8),
        (262, 3, 1),
        (277, 3, 1),
        (322, 4, 13000),
        (323, 4, 13000),
        (324, 4, 8),
        (325, 4, 8),
    ]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)


BOMBS: dict[str, Callable[[], bytes]] = {
    "png": lambda: png(20000, 20000, 8, 2, b""),
    "png_under_pillows_warning": lambda: png(9400, 9400, 8, 2, b""),
    "gif_canvas": (ODD / "decompression_bomb.gif").read_bytes,
    "gif_frame": lambda: gif_frame(10, 13000),
    "gif_dispose": lambda: gif_frame(13000, 13000),
    "webp": lambda: webp_canvas(16000, 11000),
    "icon": lambda: icon(12000, 12000),
    "tiff_tile": huge_tile,
    "bmp": lambda: (
        b"BM" + struct.pack("<IIIIiiHHIIIIII", 60, 0, 54, 40, 30000, 30000, 1, 24, *[0] * 6)
    ),
}


MEASURE = """
import json, sys
from pathlib import Path
from chiasm.images import ImageError, ImageLimits, decode_image, image_size

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def code(read, data):
    try: read(data)
    except ImageError as error: return error.code

files = {name: bytes.fromhex(text) for name, text in json.load(sys.stdin).items()}
decode_image(files.pop("warm up"))
found = {}
for name, data in files.items():
    before = peak()
    codes = [code(read, data) for read in (image_size, decode_image) * 2]
    found[name] = [sorted(set(codes)), peak() - before]
print(json.dumps(found))
"""


def text_chunks() -> bytes:
    packed = zlib.compress(bytes(2**20 - 10))
    bombs = [chunk(b"zTXt", b"k%d\0\0" % number + packed) for number in range(200)]
    return png(1, 1, 8, 0, b"\0\0", *bombs)


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[list[str], int]]:
    """Per bomb: the codes seen and the growth of the peak memory, KiB, in a fresh process."""
    files = {"warm up": save(photo(), "PNG"), **{name: make() for name, make in BOMBS.items()}}
    files["text_chunks"] = text_chunks()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=json.dumps({name: data.hex() for name, data in files.items()}),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ODD.parent.parent,
    )
    found: dict[str, tuple[list[str], int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_from_its_header_with_memory_flat(
    name: str, measured: dict[str, tuple[list[str], int]]
) -> None:
    codes, growth = measured[name]
    assert codes == ["image_too_large"]
    assert growth < 4 * 1024


def test_many_inflating_text_chunks_stay_in_bounds(
    measured: dict[str, tuple[list[str], int]],
) -> None:
    codes, growth = measured["text_chunks"]
    assert codes == ["image_parse_error"]
    assert growth < 160 * 1024  # 200 MiB inflated; Pillow stops at 64


def test_six_pictures_just_under_pillows_limit_are_each_refused() -> None:
    for _ in range(6):
        assert refuse(png(9300, 9300, 8, 0, b"")).code == "image_too_large"


@pytest.mark.parametrize("name", ["png_decompression_dos.png", "truncated_end_chunk.png"])
def test_odd_chunks_end_in_a_typed_error(name: str) -> None:
    assert refuse((ODD / name).read_bytes()).code in ("image_parse_error", "image_too_large")


def test_a_jpeg_of_endless_scans_is_refused_before_it_costs_time() -> None:
    plain = save(photo(64, 64), "JPEG", progressive=True)
    scan = plain[plain.rindex(b"\xff\xda") : -2]
    assert refuse(plain[:-2] + scan * 200 + plain[-2:]).code == "image_parse_error"
    assert pixels(plain).shape == (64, 64, 3)


def test_scan_markers_inside_metadata_are_not_counted() -> None:
    data = save(photo(), "JPEG", progressive=True, comment=b"\xff\xda" * 500)
    assert np.array_equal(pixels(data), pixels(save(photo(), "JPEG", progressive=True)))


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 100), (100, 1), (26, 28), (332, 27)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_tiny_and_thin_pictures_decode(kind: str, size: tuple[int, int]) -> None:
    assert decode_image(save(Image.new("RGB", size, RED), kind)).size == size


def test_a_picture_without_pixels_is_too_small_or_damaged() -> None:
    for data in (png(0, 5, 8, 0, b""), gif_frame(0, 0)):
        assert refuse(data).code in ("image_too_small", "image_parse_error")


# ---- damage


def test_truncated_jpegs_fail_while_decoding_not_later() -> None:
    error = refuse((ODD / "truncated_jpeg.jpg").read_bytes())
    assert error.code == "image_parse_error" and "cut short" in error.message
    whole = save(photo(200, 200), "JPEG", quality=95)
    assert refuse(whole[:-128]).code == "image_parse_error"


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(7).integers(0, 256, (40, 40, 3), dtype=np.uint8))


SAMPLES: dict[str, Callable[[], bytes]] = {
    "png": lambda: save(noise(), "PNG", icc_profile=swapped_profile(), exif=exif(6)),
    "jpeg": lambda: save(noise(), "JPEG", icc_profile=swapped_profile(), exif=exif(6)),
    "progressive": lambda: save(noise(), "JPEG", progressive=True),
    "webp": lambda: save(noise(), "WEBP", exif=exif(6)),
    "webp_moving": lambda: save(noise(), "WEBP", save_all=True, append_images=[photo(40, 40)]),
    "gif": moving_gif,
    "bmp": lambda: save(noise(), "BMP"),
    "tiff": lambda: save(noise(), "TIFF", exif=exif(6)),
    "tiff_packed": lambda: save(noise(), "TIFF", compression="tiff_lzw"),
    "avif": lambda: save(noise(), "AVIF"),
    "icon": lambda: save(noise(), "ICO", sizes=[(32, 32)], bitmap_format="bmp"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_cut_in_half_is_always_a_parse_error(name: str) -> None:
    data = SAMPLES[name]()
    cut = data[: len(data) // (6 if name == "gif" else 2)]
    assert refuse(cut).code == "image_parse_error"


@pytest.mark.parametrize("name", SAMPLES)
def test_any_damage_gives_pixels_or_a_typed_error(name: str) -> None:
    data = SAMPLES[name]()
    random = np.random.default_rng(11)
    for _ in range(150):
        broken = bytearray(data[: random.integers(1, len(data) + 1)])
        for at in random.integers(0, min(len(broken), 600), random.integers(0, 8)):
            broken[at] = random.integers(0, 256)
        try:
            image = decode_image(bytes(broken), ImageLimits(max_pixels=10**6))
        except ImageError:
            continue
        assert image.mode == "RGB"
        assert image_size(bytes(broken), ImageLimits(max_pixels=10**6)) == image.size


def test_messages_carry_no_decoder_text() -> None:
    for make in SAMPLES.values():
        data = make()
        message = refuse(data[: len(data) // 6]).message
        assert "0x" not in message and "BytesIO" not in message and "PIL" not in message


# ---- callers


def test_bytes_and_views_decode_alike() -> None:
    data = save(photo(), "PNG")
    view = memoryview(b"xx" + data + b"yy")[2:-2]
    assert np.array_equal(np.asarray(decode_image(view)), np.asarray(photo()))
    assert image_size(view) == (48, 32)


def test_the_result_owns_its_pixels() -> None:
    image = decode_image(save(photo(), "PNG"))
    image.putpixel((0, 0), RED)
    assert type(image) is Image.Image and image.getpixel((0, 0)) == RED


def test_threads_decode_as_one_thread_does() -> None:
    files = [make() for make in SAMPLES.values()] * 4
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda data: decode_image(data).tobytes(), files))
    assert together == [decode_image(data).tobytes() for data in files]


def test_nothing_is_printed_for_bombs_or_damaged_metadata() -> None:
    """In a process of its own: a test runner changes the warning filters."""
    bad_exif = save(photo(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\0" + b"\x12\x01\3\0" * 4)
    script = (
        "import sys; from chiasm.images import *\n"
        "for word in sys.argv[1:]:\n"
        "    try: decode_image(bytes.fromhex(word), ImageLimits())\n"
        "    except ImageError as error: print(error.code)\n"
    )
    words = [bad_exif.hex(), png(9470, 9470, 8, 0, b"").hex(), png(20000, 20000, 8, 0, b"").hex()]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ODD.parent.parent,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["image_too_large", "image_too_large"]


def test_text_limits_of_pillow_are_untouched() -> None:
    assert PngImagePlugin.MAX_TEXT_CHUNK == 2**20
