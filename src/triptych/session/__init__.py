"""Compose media and engine: messages in, text deltas out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.media.text import CallDelta
    from triptych.session.answer import Answer, Ending, Stream, TextDelta, TextLogprob
    from triptych.session.opening import Source
    from triptych.session.prompt import Inspection, Prompt, Sight, Terms
    from triptych.session.session import Session

_HOME = {
    "answer": ("Answer", "CallDelta", "Ending", "Stream", "TextDelta", "TextLogprob"),
    "opening": ("Source",),
    "prompt": ("Inspection", "Prompt", "Sight", "Terms"),
    "session": ("Session",),
}
__all__ = [
    "Answer", "CallDelta", "Ending", "Inspection", "Prompt", "Session", "Sight", "Source", "Stream", "Terms",
    "TextDelta", "TextLogprob",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: a decoder is being opened before a session's own parts are loaded."""
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'triptych.session' has no attribute {name!r}")
    return getattr(import_module(f"triptych.session.{home}"), name)
