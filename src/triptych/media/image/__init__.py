"""Pixels to patches: what a picture's header says, its pixels upright in RGB, and the tiles its family wants."""

from triptych.media.image.decode import PreparedImage, decode, read
from triptych.media.image.header import ImageHeader, ImageLimits, probe
from triptych.media.image.tile import at_detail, count, prepare, prompt_text, take

__all__ = [
    "ImageHeader",
    "ImageLimits",
    "PreparedImage",
    "at_detail",
    "count",
    "decode",
    "prepare",
    "probe",
    "prompt_text",
    "read",
    "take",
]
