"""What a picture says of itself in its first bytes: format, size, orientation.

Read here by hand, not by Pillow, so that a server thread can ask in microseconds and a hostile file has no parser
to keep busy: each walk over chunks or markers is bounded. `decode` holds Pillow's opinion against this one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from triptych.errors import MediaError

Format = Literal["PNG", "JPEG", "WebP", "GIF", "BMP", "TIFF"]
Facts = tuple[int, int, int]  # width and height as stored, EXIF orientation 1 to 8

ACCEPTED = "PNG, JPEG, WebP, GIF (first frame), BMP and TIFF"
MAX_HOPS = 20_000  # chunks or markers that are looked at before a file is given up

_ORIENTATION, _WIDTH, _HEIGHT = 274, 256, 257  # TIFF tags
_REFUSED = {
    b"ftypavif": "AVIF",
    b"ftypavis": "AVIF",
    b"ftyphei": "HEIC",
    b"ftyphev": "HEIC",
    b"ftypmif1": "HEIF",
    b"ftypmsf1": "HEIF",
    b"jP  \r\n": "JPEG 2000",
    b"ftyp": "a video or another ISO media file",
    b"<svg": "SVG",
    b"%PDF": "PDF",
    b"8BPS": "Photoshop",
    b"JXL \r\n": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"\x00\x00\x01\x00": "ICO",
    b"<html": "an HTML page",
    b"<!doctype html": "an HTML page",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What is refused before a raster is allocated."""

    max_bytes: int = 20 * 2**20
    max_pixels: int = 64_000_000
    max_side: int = 32_768
    max_aspect: float = 400.0  # longer side over shorter side


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """width, height: as the picture is to be seen, orientation applied."""

    format: Format
    width: int
    height: int
    orientation: int  # EXIF's, 1 to 8: what was applied

    @property
    def stored_size(self) -> tuple[int, int]:
        """(width, height) in the file's own rows and columns."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def probe(data: bytes, limits: ImageLimits) -> ImageHeader:
    """Sniff the format and read the header; labels and file names are never asked. Raises MediaError."""
    if len(data) > limits.max_bytes:
        raise MediaError(
            f"the picture has {len(data):,} bytes, the limit is {limits.max_bytes:,}",
            hint="send it smaller, or as JPEG",
        )
    name = _sniff(data)
    try:
        width, height, orientation = _READERS[name](data)
    except (struct.error, IndexError) as error:
        raise MediaError(f"the {name} ends within its header, after {len(data):,} bytes") from error
    if orientation >= 5:
        width, height = height, width
    _check_size(name, width, height, limits)
    return ImageHeader(format=name, width=width, height=height, orientation=orientation)


def _sniff(data: bytes) -> Format:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    if data.startswith((b"II*\0", b"MM\0*")):
        return "TIFF"
    start = data[:256].lstrip().lower()
    guess = next((name for mark, name in _REFUSED.items() if mark.lower() in start), None)
    raise MediaError(
        f"the {len(data):,} bytes sent as a picture are {guess or 'in no picture format'}" if data else "empty picture",
        hint=f"accepted: {ACCEPTED}",
    )


def _check_size(name: str, width: int, height: int, limits: ImageLimits) -> None:
    what = f"the {name} is {width:,}×{height:,} pixels"
    if width < 1 or height < 1:
        raise MediaError(f"{what}: it shows nothing")
    if max(width, height) > limits.max_side:
        raise MediaError(f"{what}, the limit is {limits.max_side:,} a side", hint="scale it down")
    if width * height > limits.max_pixels:
        raise MediaError(f"{what}, {width * height:,} in all; the limit is {limits.max_pixels:,}", hint="scale it down")
    aspect = max(width, height) / min(width, height)
    if aspect > limits.max_aspect:
        raise MediaError(
            f"{what}, {aspect:.0f} times as long as wide; the limit is {limits.max_aspect:.0f}", hint="crop it"
        )


def _read_png(data: bytes) -> Facts:
    if data[12:16] != b"IHDR":
        raise MediaError("the PNG does not begin with its header")
    width, height = struct.unpack_from(">II", data, 16)
    at = 8
    for _ in range(MAX_HOPS):  # eXIf may stand before or after the pixels
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"eXIf":
            return width, height, _orientation(data[at + 8 : at + 8 + length])
        at += 12 + length
    return width, height, 1


def _read_jpeg(data: bytes) -> Facts:
    at, orientation, size = 2, None, None
    for _ in range(MAX_HOPS):
        if data[at] != 0xFF:  # between segments: readers skip to the next marker
            at = data.find(b"\xff", at)
            if at < 0:
                break
        marker = data[at + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:  # fill and markers without a body
            at += 1 if marker == 0xFF else 2
            continue
        if marker in (0xD9, 0xDA):
            break
        (length,) = struct.unpack_from(">H", data, at + 2)
        if marker == 0xE1 and orientation is None and data[at + 4 : at + 10] == b"Exif\0\0":
            orientation = _orientation(data[at + 10 : at + 2 + length])
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            size = struct.unpack_from(">HH", data, at + 5)
        at += 2 + length
    if size is None:
        raise MediaError(f"the JPEG's {len(data):,} bytes hold no frame header")
    return size[1], size[0], orientation or 1


def _read_webp(data: bytes) -> Facts:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise MediaError("the WebP does not begin with a picture")
    at = 12
    for _ in range(MAX_HOPS if kind == b"VP8X" else 0):
        if at + 8 > len(data):
            break
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            return width, height, _orientation(data[at + 8 : at + 8 + length])
        at += 8 + length + length % 2
    return width, height, 1


def _read_gif(data: bytes) -> Facts:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height, 1


def _read_bmp(data: bytes) -> Facts:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:  # OS/2
        width, height = struct.unpack_from("<HH", data, 18)
    else:
        width, height = struct.unpack_from("<ii", data, 18)
    return width, abs(height), 1  # negative: rows from the top


def _read_tiff(data: bytes) -> Facts:
    tags = _tags(data)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise MediaError("the TIFF's first directory names no size")
    return tags[_WIDTH], tags[_HEIGHT], _valid(tags.get(_ORIENTATION, 1))


_READERS: dict[Format, Callable[[bytes], Facts]] = {
    "PNG": _read_png,
    "JPEG": _read_jpeg,
    "WebP": _read_webp,
    "GIF": _read_gif,
    "BMP": _read_bmp,
    "TIFF": _read_tiff,
}


def _orientation(exif: bytes) -> int:
    """Tag 274 of an EXIF block; 1 (as stored) where it is absent or makes no sense, as browsers do."""
    try:
        return _valid(_tags(exif.removeprefix(b"Exif\0\0")).get(_ORIENTATION, 1))
    except struct.error:
        return 1


def _valid(orientation: int) -> int:
    return orientation if 1 <= orientation <= 8 else 1


def _tags(tiff: bytes) -> dict[int, int]:
    """The single SHORT and LONG values of the first directory. Raises struct.error where the bytes end."""
    order = "<" if tiff[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    (num_entries,) = struct.unpack_from(order + "H", tiff, at)
    tags: dict[int, int] = {}
    for index in range(num_entries):
        entry = at + 2 + 12 * index
        tag, kind, num_values = struct.unpack_from(order + "HHI", tiff, entry)
        if num_values == 1 and kind in (3, 4):
            (tags[tag],) = struct.unpack_from(order + ("H" if kind == 3 else "I"), tiff, entry + 8)
    return tags
