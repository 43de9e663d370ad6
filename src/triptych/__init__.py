"""Triptych makes multimodal models cheap to serve: compile, prove, serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.engine.config import EngineConfig
    from triptych.errors import TriptychError
    from triptych.media.fetch import MediaPolicy
    from triptych.session import Answer, Session, TextDelta

__version__ = "0.1.0"
__all__ = ["Answer", "EngineConfig", "MediaPolicy", "Session", "TextDelta", "TriptychError", "__version__"]

_HOME = {
    "Answer": "triptych.session",
    "EngineConfig": "triptych.engine.config",
    "MediaPolicy": "triptych.media.fetch",
    "Session": "triptych.session",
    "TextDelta": "triptych.session",
    "TriptychError": "triptych.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `import triptych` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'triptych' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
