"""Bytes of a picture -> upright 8-bit sRGB pixels, under limits, or one typed error.

Rules, the same for every container:

- The format is what the bytes say. A label (media type, file name) is never looked at.
- Only `FORMATS` are tried; everything else is refused by the name of what was found.
  Nothing here parses XML, runs PostScript, opens a file or a socket.
- The declared size is compared with the limits before any buffer for pixels exists.
- Orientation (EXIF, XMP, AVIF and HEIC `irot`/`imir`) is applied; sizes are those after turning.
- Animations and multi-page files give the first picture (GIF, WebP, APNG, AVIF: frame 0 on its
  canvas; TIFF: page 0; MPO: the first JPEG; ICO: the largest entry). What frame 0 leaves bare is
  background.
- Transparency of every kind (alpha channel, palette alpha, colour key) is laid over `background`.
- 16-bit samples keep their high byte; for 32-bit integers and floats see `_narrow`.
- An ICC profile that fits the pixels is converted to sRGB; a broken one is ignored, as browsers do.

Thread safety: every call owns all it touches. Process-wide state is set once, at import: Pillow's
plugins are loaded, and warnings raised inside Pillow are ignored. `Image.MAX_IMAGE_PIXELS` stays as
Pillow ships it: a second wall behind `ImageLimits.max_pixels`, which may not exceed it.
"""

import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageFile

from chiasm import heif_boxes
from chiasm.errors import sentence

try:
    import pillow_heif
except ImportError:  # of the extra "model": where pictures are decoded
    pillow_heif = None  # type: ignore[assignment]

Size: TypeAlias = tuple[int, int]
ImageReason: TypeAlias = Literal["IMAGE_INVALID", "IMAGE_TOO_LARGE"]
ImageCode: TypeAlias = Literal[
    "image_parse_error",
    "image_too_large",
    "image_too_small",
    "image_file_too_large",
    "unsupported_image_media_type",
    "empty_image_file",
]

_HEIC: Final = () if pillow_heif is None else ("HEIC",)
FORMATS: Final = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", "AVIF", "ICO", *_HEIC)
_ACCEPTED: Final = f"send one of {', '.join(FORMATS)}"

PILLOW_MAX_PIXELS: Final = 89_478_485  # where Pillow starts to warn (Image.MAX_IMAGE_PIXELS)
_ICON_MAX_PIXELS: Final = 1024 * 1024  # Pillow decodes an icon while opening it
_JPEG_MAX_SCANS: Final = 100  # real progressive files have about 10; each scan costs a full pass

# Pixels that may be decoded for a HEIC picture, in times of the limit: tiles overlap at the edges,
# and alpha, depth and light have pictures of their own.
_HEIC_MOST_WORK: Final = 4
_HEIC_LEAST_PIXELS: Final = 1 << 20  # so that small limits leave room for what each part costs

Image.init()  # imports the plugins; lazily, inside a request, this would race between threads
if pillow_heif is not None:
    # How many pictures are decoded at once is for our caller to say.
    pillow_heif.register_heif_opener(
        decode_threads=1, thumbnails=False, depth_images=False, aux_images=False
    )
# A bomb is refused by our own limits and damaged metadata is survivable: neither belongs on stderr,
# where one client could also grow the warning registry without end.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What one picture may cost.

    `max_bytes`: of the encoded file. `max_pixels`: width x height; the default lets 24-megapixel
    cameras through and holds a decode under about 600 MB at its peak (4 bytes a pixel, three
    copies and an alpha). `max_side`: pixels. `background`: RGB, 0 to 255, shown through
    transparent pixels.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 36_000_000
    max_side: int = 32_768
    background: tuple[int, int, int] = (255, 255, 255)

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_side < 1:
            raise ValueError("max_bytes and max_side must be at least 1")
        if not 1 <= self.max_pixels <= PILLOW_MAX_PIXELS:
            raise ValueError(f"max_pixels must lie in 1..{PILLOW_MAX_PIXELS}")
        if len(self.background) != 3 or not all(0 <= c <= 255 for c in self.background):
            raise ValueError("background must be three values in 0..255")


DEFAULT_LIMITS: Final = ImageLimits()


class ImageError(Exception):
    """A picture that is not served. `message` is safe for the wire: no decoder text, no bytes."""

    def __init__(self, reason: ImageReason, code: ImageCode, message: str) -> None:
        message = sentence(message)
        super().__init__(reason, code, message)
        self.reason: Final[ImageReason] = reason
        self.code: Final[ImageCode] = code
        self.message: Final[str] = message

    def __str__(self) -> str:
        return self.message


def decode_image(data: bytes | memoryview, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Encoded file -> a decoded, upright, mode RGB image, owning its pixels and without metadata.

    Raises `ImageError` for everything that is wrong with `data`.
    """
    raw, found = _admit(data, limits)
    with _decoder_faults(found.name):
        opened = _open(raw, found, limits)
        orientation = _orientation(opened, raw)
        drawn = opened.tile[0].extents if found.plugin == "GIF" else None
        _scale_colour_key(opened)
        opened.load()
        _check_size(opened.size, limits)
        flat = _flatten(opened, drawn, limits.background)
        turn = _TURNS.get(orientation)
        if turn is not None:
            upright = flat.transpose(turn)
        else:
            upright = flat.copy() if flat is opened else flat  # rid of the file behind it
    upright.info = {}
    return upright


def image_size(data: bytes | memoryview, limits: ImageLimits = DEFAULT_LIMITS) -> Size:
    """(width, height) that `decode_image` would give, from the header; pixels stay unread.

    Raises `ImageError` as `decode_image` does, except for faults that only pixels show.
    """
    raw, found = _admit(data, limits)
    with _decoder_faults(found.name):
        opened = _open(raw, found, limits)
        width, height = opened.size
        return (height, width) if _swaps_sides(opened, raw) else (width, height)


# ---- what the bytes are


@dataclass(frozen=True, slots=True)
class _Found:
    """`plugin`: Pillow's name where the format is served. `picture`: whether it shows something."""

    name: str
    plugin: str | None = None
    picture: bool = True


_MAGIC: Final[tuple[tuple[int, bytes, _Found], ...]] = (
    (0, b"\xff\xd8\xff", _Found("JPEG", "JPEG")),
    (0, b"\x89PNG\r\n\x1a\n", _Found("PNG", "PNG")),
    (0, b"GIF87a", _Found("GIF", "GIF")),
    (0, b"GIF89a", _Found("GIF", "GIF")),
    (8, b"CR\x02\x00", _Found("Canon raw")),
    (0, b"II*\x00", _Found("TIFF", "TIFF")),
    (0, b"MM\x00*", _Found("TIFF", "TIFF")),
    (0, b"II+\x00", _Found("TIFF", "TIFF")),
    (0, b"MM\x00+", _Found("TIFF", "TIFF")),
    (0, b"\x00\x00\x01\x00", _Found("ICO", "ICO")),
    (0, b"\x00\x00\x02\x00", _Found("CUR")),
    (0, b"\x00\x00\x00\x0cjP  ", _Found("JPEG 2000")),
    (0, b"\xff\x4f\xff\x51", _Found("JPEG 2000")),
    (0, b"\x00\x00\x00\x0cJXL ", _Found("JPEG XL")),
    (0, b"\xff\x0a", _Found("JPEG XL")),
    (0, b"8BPS", _Found("Photoshop")),
    (0, b"%PDF", _Found("PDF")),
    (0, b"%!PS", _Found("PostScript")),
    (0, b"\xc5\xd0\xd3\xc6", _Found("PostScript")),
    (0, b"icns", _Found("ICNS")),
    (0, b"DDS ", _Found("DDS")),
    (0, b"qoif", _Found("QOI")),
    (0, b"\x76\x2f\x31\x01", _Found("OpenEXR")),
    (0, b"\x1aE\xdf\xa3", _Found("Matroska or WebM video")),
    (0, b"MZ", _Found("a Windows program", picture=False)),
    (0, b"\x7fELF", _Found("a program", picture=False)),
    (0, b"PK\x03\x04", _Found("a ZIP archive", picture=False)),
    (0, b"\x1f\x8b", _Found("a gzip archive", picture=False)),
    (0, b"\x93NUMPY", _Found("a NumPy array", picture=False)),
    (0, b"BM", _Found("BMP", "BMP")),
)
_AVIF_BRANDS: Final = {b"avif", b"avis"}
_HEIC_BRANDS: Final = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_UNKNOWN: Final = _Found("no image signature", picture=False)
_NETPBM: Final = re.compile(rb"P[1-6]\s")
_TEXTS: Final[tuple[tuple[bytes, _Found], ...]] = (
    (b"<!doctype html", _Found("an HTML page", picture=False)),
    (b"<html", _Found("an HTML page", picture=False)),
    (b"<svg", _Found("SVG")),
    (b"<?xml", _Found("an XML document", picture=False)),
    (b"data:", _Found("a data URL inside the data", picture=False)),
)


def _sniff(head: bytes) -> _Found:
    for at, magic, found in _MAGIC:
        if head.startswith(magic, at):
            return found
    if head[4:8] == b"ftyp":
        return _sniff_iso_media(head)
    if head.startswith(b"RIFF"):
        return _Found("WebP", "WEBP") if head[8:12] == b"WEBP" else _Found("RIFF audio or video")
    if _NETPBM.match(head):
        return _Found("Netpbm")
    return _sniff_text(head)


def _sniff_iso_media(head: bytes) -> _Found:
    """ISO/IEC 14496-12 `ftyp`: the major brand, 4 bytes of version, then the compatible brands."""
    end = min(int.from_bytes(head[:4], "big"), len(head))
    brands = {head[8:12], *(head[at : at + 4] for at in range(16, end, 4))}
    if brands & _AVIF_BRANDS:
        return _Found("AVIF", "AVIF")
    if brands & _HEIC_BRANDS:
        return _Found("HEIC", "HEIF" if _HEIC else None)
    return _Found("MP4 or QuickTime video")


def _sniff_text(head: bytes) -> _Found:
    plain = head.replace(b"\x00", b"").lower()  # without the zeros of UTF-16
    for mark, found in _TEXTS[:3]:
        if mark in plain:
            return found
    start = plain.lstrip(b"\xef\xbb\xbf\xff\xfe \t\r\n")
    for mark, found in _TEXTS[3:]:
        if start.startswith(mark):
            return found
    printable = bool(head) and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in head)
    return _Found("plain text", picture=False) if printable else _UNKNOWN


# ---- refusals


def _invalid(code: ImageCode, message: str) -> ImageError:
    return ImageError("IMAGE_INVALID", code, message)


def _too_large(message: str) -> ImageError:
    return ImageError("IMAGE_TOO_LARGE", "image_too_large", message)


def _refusal(found: _Found) -> ImageError:
    if found.picture:
        text = f"the image is {found.name}, which is not supported; {_ACCEPTED}"
        return _invalid("unsupported_image_media_type", text)
    return _invalid("image_parse_error", f"not an image: found {found.name}; {_ACCEPTED}")


@contextmanager
def _decoder_faults(name: str) -> Iterator[None]:
    """Every exception of a decoder -> `ImageError`. Decoders raise any type: SyntaxError,
    struct.error, zlib.error, EOFError, OverflowError, RuntimeError, UnicodeError and more."""
    try:
        yield
    except ImageError:
        raise
    except (MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(f"the {name} needs too much memory; send a smaller image") from error
    except Exception as error:
        fault = "cut short" if "truncated" in str(error).lower() else "damaged"
        text = f"the {name} data is {fault} and cannot be decoded; send the complete, intact file"
        raise _invalid("image_parse_error", text) from error


def _check_bytes(count: int, limits: ImageLimits) -> None:
    if count == 0:
        raise _invalid("empty_image_file", "the image has 0 bytes; send the file's content")
    if count > limits.max_bytes:
        text = f"the image file has {count} bytes; the limit is {limits.max_bytes}"
        raise ImageError("IMAGE_TOO_LARGE", "image_file_too_large", f"{text}; send a smaller file")


def _check_size(size: Size, limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        text = f"the image is {width}x{height} and has no pixels; send at least 1x1"
        raise _invalid("image_too_small", text)
    if width * height > limits.max_pixels:
        text = f"{width}x{height} = {width * height} pixels; the limit is {limits.max_pixels}"
        raise _too_large(f"the image has {text}; scale it down")
    if max(size) > limits.max_side:
        text = f"the image is {width}x{height}; the limit for a side is {limits.max_side}"
        raise _too_large(f"{text}; scale it down")


# ---- before the pixels


def _admit(data: bytes | memoryview, limits: ImageLimits) -> tuple[bytes, _Found]:
    _check_bytes(data.nbytes if isinstance(data, memoryview) else len(data), limits)
    raw = bytes(data)  # no copy where it is bytes already
    found = _sniff(raw[:1024])
    if found.plugin is None:
        raise _refusal(found)
    return raw, found


def _open(raw: bytes, found: _Found, limits: ImageLimits) -> ImageFile.ImageFile:
    for size in _sizes_allocated_on_open(raw, found):
        _check_size(size, limits)
    if found.plugin == "HEIF":
        raw = _heic_alone(raw, limits)
    opened = Image.open(BytesIO(raw), formats=[str(found.plugin)])
    _check_size(opened.size, limits)
    if found.plugin == "JPEG" and opened.info.get("progressive"):
        _check_scans(raw)
    if found.plugin == "TIFF":
        _check_tile(getattr(opened, "tag_v2", {}), limits)
    return opened


def _sizes_allocated_on_open(raw: bytes, found: _Found) -> Iterator[Size]:
    """Sizes for which Pillow fills a buffer, or gives up without a word, while it opens a file."""
    if found.plugin == "PNG" and raw[12:16] == b"IHDR":
        yield struct.unpack_from(">II", raw, 16)
    elif found.plugin == "GIF":
        yield from _gif_sizes(raw)
    elif found.plugin == "WEBP":
        yield from _webp_sizes(raw)
    elif found.plugin == "ICO":
        for size in _ico_sizes(raw):
            if size[0] * size[1] > _ICON_MAX_PIXELS:
                text = f"the icon has an entry of {size[0]}x{size[1]}"
                raise _too_large(f"{text}; the limit is {_ICON_MAX_PIXELS} pixels; send a PNG")
            yield size


def _gif_sizes(raw: bytes) -> Iterator[Size]:
    """GIF89a sections 18 to 23: the canvas, then the first frame's reach."""
    yield struct.unpack_from("<HH", raw, 6)
    flags = raw[10]
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at < len(raw) and raw[at] not in b",;":
        at = _after_gif_blocks(raw, at + 2) if raw[at : at + 1] == b"!" else at + 1
    if raw[at : at + 1] == b",":
        left, top, width, height = struct.unpack_from("<4H", raw, at + 1)
        yield left + width, top + height


def _after_gif_blocks(raw: bytes, at: int) -> int:
    while raw[at]:
        at += raw[at] + 1
    return at + 1


def _webp_sizes(raw: bytes) -> Iterator[Size]:
    """RFC 9649: the canvas of the extended form; the simple forms cannot exceed 16384 a side."""
    if raw[12:16] == b"VP8X":
        yield (int.from_bytes(raw[24:27], "little") + 1, int.from_bytes(raw[27:30], "little") + 1)
    elif raw[12:16] == b"VP8L":
        bits = int.from_bytes(raw[21:25], "little")
        yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif raw[12:16] == b"VP8 ":
        width, height = struct.unpack_from("<HH", raw, 26)
        yield width & 0x3FFF, height & 0x3FFF


def _ico_sizes(raw: bytes) -> Iterator[Size]:
    """Each entry's own header (PNG, or a DIB whose height counts its mask too); the directory's
    sizes are one byte each and not to be trusted."""
    (count,) = struct.unpack_from("<H", raw, 4)
    for entry in range(count):
        (at,) = struct.unpack_from("<I", raw, 6 + 16 * entry + 12)
        if raw[at : at + 8] == b"\x89PNG\r\n\x1a\n":
            yield struct.unpack_from(">II", raw, at + 16)
        else:
            width, height = struct.unpack_from("<ii", raw, at + 4)
            yield abs(width), abs(height) // 2


def _heic_alone(raw: bytes, limits: ImageLimits) -> bytes:
    """The file with its primary picture only, once all that it declares is within the limits."""
    declared = heif_boxes.declared(raw)
    if declared.codings != {b"hvc1"}:
        raise _refusal(_Found("HEIF in another coding than HEVC"))
    for width, height in declared.sizes:
        _check_size((_unrounded(width), _unrounded(height)), limits)
    most = _HEIC_MOST_WORK * max(limits.max_pixels, _HEIC_LEAST_PIXELS)
    if declared.work > most:
        text = f"the parts of the HEIC picture have {declared.work} pixels together"
        raise _too_large(f"{text}; the limit is {most}; save it again as a JPEG")
    return declared.alone


def _unrounded(side: int) -> int:
    """Coders round sides up to their blocks, of 64 pixels at most, and have the edge cut off."""
    return min(side, max(1, side - 63))


def _check_tile(tags: Any, limits: ImageLimits) -> None:
    """A small TIFF may declare one huge tile; 322 and 323 are TileWidth and TileLength."""
    _check_size((int(tags.get(322, 1)), int(tags.get(323, 1))), limits)


_JPEG_MARKER: Final = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")


def _check_scans(raw: bytes) -> None:
    """Each scan of a few bytes costs a pass over all pixels: a bomb of time, not of memory."""
    scans, at = 0, 2
    while (marker := _JPEG_MARKER.search(raw, at)) and marker[1] != b"\xd9":
        scans += marker[1] == b"\xda"
        if scans > _JPEG_MAX_SCANS:
            text = f"the JPEG has more than {_JPEG_MAX_SCANS} progressive scans"
            raise _invalid("image_parse_error", f"{text}; save it again as an ordinary JPEG")
        at = marker.end() + int.from_bytes(raw[marker.end() : marker.end() + 2], "big")


# ---- orientation

_TURNS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _orientation(opened: ImageFile.ImageFile, raw: bytes) -> int:
    """EXIF value 1 to 8 that is still to be applied after loading; damaged metadata counts as 1."""
    if opened.format in ("TIFF", "HEIF"):
        return (
            1  # turned while they are loaded, a HEIC by its boxes alone (ISO/IEC 23008-12, A.2.1)
        )
    return _declared_orientation(opened, raw)


def _declared_orientation(opened: ImageFile.ImageFile, raw: bytes) -> int:
    if opened.format == "PNG" and "exif" not in opened.info and (late := _late_png_exif(raw)):
        opened.info["exif"] = late
    try:  # the base method: PNG's own would decode the pixels to look behind them
        value = Image.Image.getexif(opened).get(ExifTags.Base.Orientation, 1)
    except Exception:  # the metadata reader raises any type, as decoders do
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _swaps_sides(opened: ImageFile.ImageFile, raw: bytes) -> bool:
    if opened.format == "HEIF":
        return False
    value = _declared_orientation(opened, raw)
    if opened.format == "TIFF" and ExifTags.Base.Orientation in getattr(opened, "tag_v2", {}):
        return False  # the tag is in Pillow's size already; one that only XMP names is not
    return value >= 5


def _late_png_exif(raw: bytes) -> bytes | None:
    """The eXIf chunk may stand after the pixels (PNG third edition, 5.6)."""
    at = 8
    while b"eXIf" in raw and at + 8 <= len(raw):
        length, kind = struct.unpack_from(">I4s", raw, at)
        if kind == b"eXIf":
            return raw[at + 8 : at + 8 + length]
        at += 12 + length
    return None


# ---- pixels


def _scale_colour_key(opened: ImageFile.ImageFile) -> None:
    """PNG's tRNS counts in the file's samples; Pillow hands out samples scaled to 8 bits."""
    key = opened.info.get("transparency")
    raw_mode = opened.tile[0].args if opened.format == "PNG" and opened.tile else None
    if raw_mode == "RGB;16B" and isinstance(key, tuple):
        opened.info["transparency"] = tuple(value >> 8 for value in key)
    elif raw_mode in ("L;2", "L;4") and isinstance(key, int):
        opened.info["transparency"] = key * (85 if raw_mode == "L;2" else 17) & 0xFF


def _flatten(
    loaded: Image.Image, drawn: tuple[int, int, int, int] | None, background: tuple[int, int, int]
) -> Image.Image:
    """Any mode -> RGB over the background; outside `drawn` (left, top, right, bottom) is bare."""
    colour, alpha = _split(loaded)
    rgb = _to_srgb(colour, loaded.info.get("icc_profile"))
    if drawn is not None and drawn != (0, 0, *loaded.size):
        bare = Image.new("L", loaded.size, 0)
        bare.paste(255 if alpha is None else alpha.crop(drawn), drawn)
        alpha = bare
    if alpha is None:
        return rgb
    canvas = Image.new("RGB", loaded.size, background)
    canvas.paste(rgb, mask=alpha)
    return canvas


def _split(loaded: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """(colours without alpha, alpha or None where all is opaque)"""
    if loaded.mode.startswith("I") or loaded.mode == "F":
        return _split_wide(loaded)
    if loaded.mode == "LA":
        return loaded.getchannel("L"), loaded.getchannel("A")
    if loaded.has_transparency_data:
        rgba = loaded if loaded.mode == "RGBA" else loaded.convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    if loaded.mode in ("P", "1"):
        return loaded.convert("RGB" if loaded.mode == "P" else "L"), None
    return loaded, None


def _split_wide(loaded: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    samples = np.asarray(loaded)
    key = loaded.info.get("transparency")
    colour = Image.fromarray(_narrow(samples))
    if not isinstance(key, int):
        return colour, None
    return colour, Image.fromarray(np.where(samples == key, 0, 255).astype(np.uint8))


def _narrow(samples: NDArray[Any]) -> NDArray[np.uint8]:
    """Grey samples wider than 8 bits -> uint8 of the same shape.

    uint16: the high byte, as for 16-bit colour. Other types have no agreed white point, so the
    narrowest customary range that holds every sample is taken (floats: 0..1, then 0..255; integers:
    0..255, then 0..65535), else the picture's own range is stretched. Not-a-number is black.
    """
    if samples.dtype.kind == "u":
        return (samples >> 8).astype(np.uint8)
    rows = max(1, 2**20 // samples.shape[1])  # a megapixel at a time: float64 is 8 bytes each
    blocks = [samples[at : at + rows] for at in range(0, samples.shape[0], rows)]
    low = min(float(_finite(block).min()) for block in blocks)
    high = max(float(_finite(block).max()) for block in blocks)
    ranges = (1.0, 255.0) if samples.dtype.kind == "f" else (255.0, 65535.0)
    top = next((top for top in ranges if low >= 0 and high <= top), None)
    low, span = (low, high - low or 1.0) if top is None else (0.0, top)
    return np.concatenate([_scaled(block, low, span) for block in blocks])


def _finite(block: NDArray[Any]) -> NDArray[np.float64]:
    return np.nan_to_num(block.astype(np.float64))


def _scaled(block: NDArray[Any], low: float, span: float) -> NDArray[np.uint8]:
    return np.rint((_finite(block) - low) / span * 255.0).astype(np.uint8)


_PROFILE_SPACES: Final = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK", "LAB": "Lab"}


def _to_srgb(colour: Image.Image, icc: bytes | None) -> Image.Image:
    """`colour` through its profile; by Pillow's plain formulas where it has none that fits."""
    try:
        converted = _through_profile(colour, icc)
    except ImageCms.PyCMSError:
        converted = None
    plain = converted or colour
    return plain if plain.mode == "RGB" else plain.convert("RGB")


def _through_profile(colour: Image.Image, icc: bytes | None) -> Image.Image | None:
    if icc:
        source = ImageCms.getOpenProfile(BytesIO(icc))
    elif colour.mode == "LAB":
        source = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    else:
        return None
    if source.profile.xcolor_space.strip() != _PROFILE_SPACES.get(colour.mode):
        return None
    if "srgb" in (source.profile.profile_description or "").lower():
        return None  # the common case: nothing to convert, and no rounding
    return ImageCms.profileToProfile(
        colour,
        source,
        ImageCms.createProfile("sRGB"),
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        outputMode="RGB",
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
