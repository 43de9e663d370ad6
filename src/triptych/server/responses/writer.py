"""The events of one response, in OpenAI's order, each with its number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triptych.server.dialect import Block, Event, Reply
from triptych.server.openai import answers as completions
from triptych.server.refusals import body_of
from triptych.server.responses import answers
from triptych.server.responses.answers import Logprobs, OutputTextPart, ResponseError
from triptych.session import CallDelta, TextDelta


class ResponsesWriter:
    """An item opens with its block's first piece, and closes before the next one opens or the answer ends."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        (self._choice,) = reply.choices
        self._num_events = 0
        self._at = -1  # the index of the block that is open, or was the last to be
        self._is_open = False
        self._logprobs: Logprobs = []  # so far

    def write(self, index: int, delta: TextDelta) -> Iterator[Event]:
        logprobs = completions.chat_logprobs(delta.logprobs).content
        self._logprobs += logprobs
        if not self._num_events:
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=answers.response(self._reply, "in_progress"))
        is_empty = delta.finish is not None and not self._choice.blocks
        if delta.text or is_empty:
            yield from self._text(delta.text, logprobs)
        for call in delta.calls:
            yield from self._call(call)

    def end(self) -> Iterator[Event]:
        yield from self._close()
        done = answers.ended(self._reply, self._logprobs)
        yield self._event(f"response.{done.status}", response=done)

    def fail(self, error: Exception) -> Iterator[Event]:
        told = body_of(error).error
        yield self._event("error", code=told.code, message=told.message, param=told.param)
        code = "rate_limit_exceeded" if told.type == "rate_limit_error" else "server_error"
        failed = answers.response(self._reply, "failed", error=ResponseError(code=code, message=told.message))
        yield self._event("response.failed", response=failed)

    def _text(self, text: str, logprobs: Logprobs) -> Iterator[Event]:
        if not self._is_open or self._block.name is not None:
            yield from self._open()
            yield self._event("response.content_part.added", **self._place(), part=OutputTextPart(text=""))
        if text:
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _call(self, call: CallDelta) -> Iterator[Event]:
        if call.name is not None:
            yield from self._open()
        if call.arguments:
            yield self._event("response.function_call_arguments.delta", **self._item(), delta=call.arguments)

    def _open(self) -> Iterator[Event]:
        yield from self._close()
        self._at += 1
        self._is_open = True
        new = answers.item(self._reply, self._at, "in_progress", [])
        yield self._event("response.output_item.added", output_index=self._at, item=new)

    def _close(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        if self._block.name is None:
            part = answers.part(self._choice, self._block, self._logprobs)
            text, logprobs = part.text, part.logprobs
            yield self._event("response.output_text.done", **self._place(), text=text, logprobs=logprobs)
            yield self._event("response.content_part.done", **self._place(), part=part)
        else:
            name, arguments = self._block.name, self._block.text
            yield self._event("response.function_call_arguments.done", **self._item(), name=name, arguments=arguments)
        status = answers.status_of(self._choice, self._at)
        done = answers.item(self._reply, self._at, status, self._logprobs)
        yield self._event("response.output_item.done", output_index=self._at, item=done)

    @property
    def _block(self) -> Block:
        return self._choice.blocks[self._at] if self._choice.blocks else Block()

    def _item(self) -> dict[str, Any]:
        return {"output_index": self._at, "item_id": answers.item_id(self._reply, self._at, self._block)}

    def _place(self) -> dict[str, Any]:
        return {**self._item(), "content_index": 0}

    def _event(self, kind: str, /, **facts: Any) -> Event:
        event = Event(name=kind, data={"type": kind, "sequence_number": self._num_events, **facts})
        self._num_events += 1
        return event
