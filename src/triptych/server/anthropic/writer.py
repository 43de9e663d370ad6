"""The events of one message, in Anthropic's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.server.anthropic import answers
from triptych.server.anthropic.answers import TextOut, ToolUseOut
from triptych.server.dialect import Event, Reply
from triptych.server.openai.answers import trace
from triptych.server.refusals import messages_body_of
from triptych.session import TextDelta


class MessagesWriter:
    """A block starts with its first piece, and stops before the next one starts or the message ends."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._has_begun = False
        self._at = -1  # the index of the block that is open, or was the last to be
        self._is_text = False
        self._is_open = False

    def write(self, index: int, delta: TextDelta) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield _event("message_start", message=answers.begun(self._reply))
        if delta.text:
            if not (self._is_open and self._is_text):
                yield from self._start(TextOut(text=""))
            yield self._piece(type="text_delta", text=delta.text)
        for call in delta.calls:
            if call.name is not None:
                yield from self._start(ToolUseOut(id=call.id or "", name=call.name, input={}))
            if call.arguments:
                yield self._piece(type="input_json_delta", partial_json=call.arguments)

    def end(self) -> Iterator[Event]:
        yield from self._stop()
        (choice,) = self._reply.choices
        reason = {"stop_reason": answers.stop_reason(self._reply), "stop_sequence": answers.stop_sequence(choice)}
        usage = answers.bill(self._reply.usage())
        yield _event("message_delta", delta=reason, usage=usage, triptych=trace(choice.usage, choice.timing))
        yield _event("message_stop")

    def fail(self, error: Exception) -> Iterator[Event]:
        yield _event("error", error=messages_body_of(error).error)

    def _start(self, block: TextOut | ToolUseOut) -> Iterator[Event]:
        yield from self._stop()
        self._at += 1
        self._is_open, self._is_text = True, isinstance(block, TextOut)
        yield _event("content_block_start", index=self._at, content_block=block)

    def _stop(self) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            yield _event("content_block_stop", index=self._at)

    def _piece(self, **piece: str) -> Event:
        return _event("content_block_delta", index=self._at, delta=piece)


def _event(kind: str, /, **facts: Any) -> Event:
    return Event(name=kind, data={"type": kind, **facts})
