"""Compose media and engine: messages in, text deltas out."""

from triptych.session.answer import Answer, CallDelta, Ending, Stream, TextDelta, TextLogprob
from triptych.session.opening import Source
from triptych.session.prompt import Inspection, Prompt, Sight, Terms
from triptych.session.session import Session

__all__ = [
    "Answer",
    "CallDelta",
    "Ending",
    "Inspection",
    "Prompt",
    "Session",
    "Sight",
    "Source",
    "Stream",
    "Terms",
    "TextDelta",
    "TextLogprob",
]
