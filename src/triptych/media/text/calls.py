"""Calls of tools, read out of an answer's text while it arrives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from triptych.media.text.stop import overlap
from triptych.media.text.tools import CallSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of the answer's tool call number `index`. The first of a call has `id` and `name`; JSON text follows."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class CallReader:
    """Splits a text into what is said and what is called. However it is cut into pieces, the outcome is the same.

    The text is one that a guide held to the syntax, or the beginning of one. Blanks before a call are the syntax's.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._held = ""
        self._blanks = ""  # before the first call
        self._state: Callable[[], bool] = self._say  # takes from `_held`; False when it needs more
        self._index = -1
        self._said: list[str] = []
        self._pieces: list[CallDelta] = []
        self._json = _Nesting()

    def push(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """What is certain now: text that is said, then pieces of calls."""
        self._held += text
        while self._held and self._state():
            pass
        return self._taken()

    def flush(self) -> tuple[str, tuple[CallDelta, ...]]:
        """What was held back, now that nothing follows: a call whose name is cut off is text."""
        if self._state in (self._say, self._name):
            self._said.append(self._blanks + self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> tuple[str, tuple[CallDelta, ...]]:
        said, pieces = "".join(self._said), tuple(self._pieces)
        self._said, self._pieces = [], []
        return said, pieces

    # ── states ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self) -> bool:
        sign = self._syntax.sign
        at = self._held.find(sign)
        if at == 0 or (at > 0 and not self._syntax.is_first):
            said = self._held[:at].rstrip()
            self._said.append(said)
            self._blanks, self._held = self._held[len(said) : at], self._held[at:]
            return self._go(self._name)
        if self._syntax.is_first:
            if sign.startswith(self._held):
                return False
            return self._go(self._pass)
        end = len(self._held) - overlap(self._held, sign)
        end = len(self._held[:end].rstrip())
        self._said.append(self._held[:end])
        self._held = self._held[end:]
        return False

    def _pass(self) -> bool:
        self._said.append(self._held)
        self._held = ""
        return False

    def _name(self) -> bool:
        """From the sign or the joint to the arguments."""
        head = self._syntax.sign + self._syntax.begin if self._index < 0 else self._syntax.joint or ""
        end = self._held.find(self._syntax.middle, len(head))
        if end < 0:
            return False
        try:
            name = json.loads(f'"{self._held[len(head) : end]}"')
        except ValueError:  # what a form of the caller's own led to
            self._held, self._blanks = self._blanks + self._held, ""
            return self._go(self._pass)
        self._index += 1
        self._blanks = ""
        self._pieces.append(CallDelta(index=self._index, id=self._syntax.new_id(), name=name))
        self._held = self._held[end + len(self._syntax.middle) :]
        self._json = _Nesting()
        return self._go(self._arguments)

    def _arguments(self) -> bool:
        end = self._json.end_in(self._held)
        own = len(self._held) if end is None else end
        self._pieces.append(CallDelta(index=self._index, arguments=self._held[:own]))
        self._held = self._held[own:]
        return end is not None and self._go(self._after)

    def _after(self) -> bool:
        """Behind the arguments: the end of the call, then a further one, or the end of all."""
        further = self._syntax.end + (self._syntax.joint or self._syntax.close)
        if self._syntax.joint and self._held.startswith(further):
            self._held = self._held[len(self._syntax.end) :]
            return self._go(self._name)
        return False

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True


class _Nesting:
    """Where one JSON object ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """The place behind its last brace, if that is in this next piece."""
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None
