"""Get the bytes safely: limits on size, pixels, time and address."""

from triptych.media.fetch.decoders import DecoderConfig, Decoders
from triptych.media.fetch.policy import MediaPolicy
from triptych.media.fetch.source import resolve

__all__ = ["DecoderConfig", "Decoders", "MediaPolicy", "resolve"]
