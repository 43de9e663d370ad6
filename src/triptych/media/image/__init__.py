"""Pixels to patches: a picture's header, its upright pixels, its family's tiles."""

from triptych.media.image.adapt import adapted
from triptych.media.image.decode import PreparedImage, decode, read
from triptych.media.image.header import ImageHeader, ImageLimits, probe
from triptych.media.image.tile import at_detail, count, num_bytes, prepare, prompt_text, runs, take

__all__ = [
    "ImageHeader", "ImageLimits", "PreparedImage", "adapted", "at_detail", "count", "decode", "num_bytes", "prepare",
    "probe", "prompt_text", "read", "runs", "take",
]  # fmt: skip
