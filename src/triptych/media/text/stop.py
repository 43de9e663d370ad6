"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on, except what may yet become a stop string.

    The match is the one that is complete first, and of those that end together the longest: however the text is
    cut into pieces, the outcome is the same.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be shown now, and the stop string if it ends here."""
        if not self._stops:
            return text, None
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start, stop = min(ends)
            self._held = ""
            return text[: end if self._include else start], stop
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is the beginning of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
