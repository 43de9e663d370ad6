"""The verbs; each imports its stage only when called."""

from __future__ import annotations

from triptych.cli.verbs import main

__all__ = ["main"]
