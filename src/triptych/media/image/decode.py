"""Bytes to upright RGB pixels, alpha over white, whatever the file's own colours are.

Formats are opened by their own readers and not by `Image.open`, whose limits are global switches of the process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import jpeg_factory
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from triptych.core.spec import ImageSpec
from triptych.errors import MediaError
from triptych.media.image.header import Format, ImageHeader, ImageLimits, probe
from triptych.media.image.tile import prepare

_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # TIFF tags

_READERS: dict[Format, Callable[[BytesIO], Image.Image]] = {
    "PNG": PngImageFile,
    "JPEG": jpeg_factory,
    "WebP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
}
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """One picture, ready to be named and encoded."""

    content_sha256: str  # of the upright RGB pixels: the same for PNG, WebP or a URL of the same picture
    size: tuple[int, int]  # (width, height), upright
    tiles: NDArray[np.uint8]  # (num_tiles, side, side, 3)
    take: NDArray[np.int32]  # (num_tokens,)
    unpack_s: float = 0.0  # seconds that the file took to become pixels,
    preprocess_s: float = 0.0  # and the pixels to become tiles


def read(data: bytes, limits: ImageLimits, spec: ImageSpec) -> PreparedImage:
    """Decode and cut in this process: what `media/fetch`'s workers do in theirs. Raises MediaError."""
    began_s = time.perf_counter()
    image = decode(data, limits)
    unpacked_s = time.perf_counter()
    tiles, take = prepare(image, spec)
    return PreparedImage(
        content_sha256=hashlib.sha256(image.tobytes()).hexdigest(),
        size=image.size,
        tiles=tiles,
        take=take,
        unpack_s=unpacked_s - began_s,
        preprocess_s=time.perf_counter() - unpacked_s,
    )


def decode(data: bytes, limits: ImageLimits) -> Image.Image:
    """The first frame as upright RGB. Nothing is allocated before the header is within `limits`. Raises MediaError."""
    header = probe(data, limits)
    try:
        image = _to_rgb(_load(data, header))
    except MediaError:
        raise
    except MemoryError as error:
        raise MediaError(f"{_what(header)} needs more memory than its decoder may use") from error
    except Exception as error:  # Pillow's readers raise whatever their parsers stumble on
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise MediaError(f"{_what(header)} cannot be decoded: {reason}", hint="is it complete?") from error
    upright = _UPRIGHT.get(header.orientation) if header.format != "TIFF" else None  # Pillow turns TIFFs itself
    return image if upright is None else image.transpose(upright)


def _what(header: ImageHeader) -> str:
    return f"the {header.width:,}×{header.height:,} {header.format}"


def _load(data: bytes, header: ImageHeader) -> Image.Image:
    image = _READERS[header.format](BytesIO(data))
    expected = (header.width, header.height) if header.format == "TIFF" else header.stored_size
    if image.size != expected:
        raise MediaError(f"{_what(header)} holds a picture of {image.width:,}×{image.height:,} instead")
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert before or after loading as the mode needs; modes are Pillow's."""
    raw_mode = _raw_mode(image)
    image.load()
    if image.mode.startswith("I;16"):
        image = _from_16_bits(image)
    elif image.mode in ("I", "F"):
        kind = "whole" if image.mode == "I" else "floating-point"
        raise MediaError(
            f"its pixels are 32-bit {kind} numbers, and which of them is white is not known",
            hint="save it with 8 or 16 bits a channel",
        )
    elif "transparency" in image.info:
        image.info["transparency"] = _scaled_key(image.info["transparency"], raw_mode)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _raw_mode(image: Image.Image) -> str:
    """How the file packs its samples, in Pillow's words; it is forgotten once the pixels are loaded."""
    tile: Any = getattr(image, "tile", None)
    args = tile[0].args if tile else ""
    return args if isinstance(args, str) else str(args[0]) if args else ""


def _scaled_key(key: Any, raw_mode: str) -> Any:
    """PNG names its transparent colour in the file's own depth; Pillow's pixels have 8 bits."""
    if raw_mode == "L;2" or raw_mode == "L;4":
        return key * (85 if raw_mode == "L;2" else 17)
    if raw_mode == "RGB;16B":
        return tuple(sample >> 8 for sample in key)
    return key


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Gray of up to 16 bits to 8, rounded; Pillow's own conversion clips at 255."""
    samples = np.asarray(image)
    tags: Any = getattr(image, "tag_v2", {})
    white = (1 << tags.get(_BITS_PER_SAMPLE, (16,))[0]) - 1
    table = np.minimum((np.arange(1 << 16) * 255 + white // 2) // white, 255).astype(np.uint8)
    gray = table[samples]
    if tags.get(_PHOTOMETRIC) == 0:  # white is zero
        gray = 255 - gray
    key = image.info.get("transparency")
    if key is None:
        return Image.fromarray(gray)
    return Image.fromarray(np.stack([gray, np.where(samples == key, 0, 255).astype(np.uint8)], axis=-1), "LA")
