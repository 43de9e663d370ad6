"""How long work is told of: what is being done, and how much of it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]  # what is being done, and how much of it, 0 to 1


def silent(what: str, share: float) -> None:
    """Nobody looks on."""
