"""Small files of every kind that is read, to be damaged: formats, modes, packings, turns, animations."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

SIZE = (23, 17)


def corpus() -> list[bytes]:
    return [*_by_mode(), *_by_option(), *_by_hand()]


def _picture(mode: str) -> Image.Image:
    width, height = SIZE
    values = np.random.default_rng(len(mode)).integers(0, 256, (height, width, 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    if mode in ("I", "F"):
        return Image.fromarray(values[..., 0].astype(np.int32 if mode == "I" else np.float32))
    colour = Image.fromarray(values[..., :3])
    if mode in ("RGBA", "LA", "PA"):
        colour.putalpha(Image.fromarray(values[..., 3]))
    return colour.quantize(16) if mode == "P" else colour.convert(mode)


def _saved(image: Image.Image, kind: str, **options: Any) -> Iterator[bytes]:
    stream = io.BytesIO()
    try:
        image.save(stream, kind, **options)
    except (OSError, ValueError, KeyError):  # a format without this mode
        return
    yield stream.getvalue()


def _by_mode() -> Iterator[bytes]:
    for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I", "F"):
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
            yield from _saved(_picture(mode), kind)


def _by_option() -> Iterator[bytes]:
    image, turned = _picture("RGB"), Image.Exif()
    turned[274] = 6
    profile = b"\0" * 128 + struct.pack(">I", 0)
    for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
        yield from _saved(image, kind, exif=turned)
        yield from _saved(image, kind, icc_profile=profile)
    for options in (
        {"progressive": True},
        {"optimize": True},
        {"quality": 5, "subsampling": 2},
        {"restart_marker_rows": 1},
    ):
        yield from _saved(image, "JPEG", **options)
    for options in ({"lossless": True}, {"quality": 1}, {"lossless": True, "exact": True}):
        yield from _saved(_picture("RGBA"), "WEBP", **options)
    for packing in ("raw", "tiff_lzw", "tiff_deflate", "packbits", "jpeg", "group3", "group4", "lzma", "zstd", "webp"):
        for mode in ("1", "L", "P", "RGB", "CMYK"):
            yield from _saved(_picture(mode), "TIFF", compression=packing)
    yield from _saved(_picture("P"), "PNG", transparency=3)
    yield from _saved(_picture("P"), "GIF", transparency=3, interlace=1)
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        yield from _saved(image, kind, save_all=True, append_images=[_picture("L"), _picture("RGBA")])


def _by_hand() -> Iterator[bytes]:
    """PNGs that Pillow does not write: interlaced, of few bits, with a key, of 16 bits."""
    for depth, colour, row, extra in (
        (1, 0, 3, b""), (2, 0, 6, b"\0\1"), (4, 0, 12, b"\0\1"), (16, 0, 46, b"\1\2"), (16, 2, 138, b"\1\2\3\4\5\6"),
        (16, 4, 92, b""), (16, 6, 184, b""),
    ):  # fmt: skip
        for interlace in (0, 1):
            header = struct.pack(">IIBBBBB", *SIZE, depth, colour, 0, 0, interlace)
            rows = zlib.compress(
                b"".join(b"\0" + bytes(range(at, at + row)) for at in range(SIZE[1] * (1 + interlace)))
            )
            keys = _chunk(b"tRNS", extra) if extra else b""
            yield b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + keys + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
