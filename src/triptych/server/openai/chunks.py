"""A stream of chat or text completions: an envelope around each piece of a choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from triptych.server.dialect import Choice, Event, Reply
from triptych.server.openai import answers
from triptych.server.refusals import body_of
from triptych.session import TextDelta


class Pieces(Protocol):
    def opening(self, index: int, choice: Choice) -> list[Any]:
        """What comes before an answer's first delta."""

    def pieces(self, index: int, delta: TextDelta, choice: Choice) -> list[Any]:
        """What one delta is worth, which `choice` has taken already."""


class ChunkWriter:
    """Writes each piece as a chunk of its own, then the bill where it was asked for, then `[DONE]`."""

    def __init__(self, reply: Reply, kind: str, pieces: Pieces) -> None:
        self._reply = reply
        self._pieces = pieces
        self._chunk = answers.envelope(reply, kind)
        self._chunk.usage = None if reply.ask.wants_usage else msgspec.UNSET
        self._unopened = set(range(len(reply.choices)))

    def write(self, index: int, delta: TextDelta) -> Iterator[Event]:
        choice, pieces = self._reply.choices[index], []
        if index in self._unopened:
            self._unopened.remove(index)
            pieces += self._pieces.opening(index, choice)
        for piece in pieces + self._pieces.pieces(index, delta, choice):
            chunk = msgspec.structs.replace(self._chunk, choices=[piece])
            if self._reply.ask.bills_each:
                chunk.usage = answers.bill(self._reply.usage())
            yield Event(data=chunk)

    def end(self) -> Iterator[Event]:
        if self._reply.ask.wants_usage:
            self._chunk.usage = answers.bill(self._reply.usage())
            yield Event(data=self._chunk)
        yield Event(data="[DONE]")

    def fail(self, error: Exception) -> Iterator[Event]:
        yield Event(data=body_of(error))
