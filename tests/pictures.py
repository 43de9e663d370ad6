"""Pictures as files: saved in a format, turned by EXIF."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

# How each EXIF orientation lays a picture down, so that it will be turned upright again.
TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,  # the inverse of how it will be turned back
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[274] = orientation
    return block
