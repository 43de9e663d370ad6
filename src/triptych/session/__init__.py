"""Compose media and engine: messages in, text deltas out."""

from triptych.session.answer import Answer, Ending, Stream, TextDelta, TextLogprob
from triptych.session.opening import Source
from triptych.session.prompt import Prompt
from triptych.session.session import Session

__all__ = ["Answer", "Ending", "Prompt", "Session", "Source", "Stream", "TextDelta", "TextLogprob"]
