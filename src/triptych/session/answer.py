"""An answer while it arrives: ids to text, stop strings; read in a thread or a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from triptych.core.chat import ToolCall
from triptych.core.request import Delta, FinishReason, StepRecord, Timing, TokenLogprob, Usage
from triptych.errors import BackendError
from triptych.media.text import CallDelta, CallReader, CallSyntax, StopStrings, Text


class TextLogprob(StepRecord, frozen=True, kw_only=True):
    """A token as text, its bytes, and its natural-log probability; `top` has the likeliest, that one first."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TextLogprob, ...] = ()


Spelled = Callable[[], tuple[TextLogprob | None, ...]]  # of a prompt: takes a while when it is first called


class TextDelta(StepRecord, frozen=True, kw_only=True):
    """What has become certain since the last one. The last has `finish`, `usage` and `timing`."""

    text: str
    calls: tuple[CallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token's id
    prompt_logprobs: Spelled | None = None  # with the first token, where asked
    usage: Usage | None = None
    timing: Timing | None = None
    detokenize_s: float = 0.0  # of the last: seconds that this answer's ids took to become text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...]
    finish: FinishReason
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What ends a text besides the model: strings, and whether they are part of it."""

    stop: Sequence[str] = ()
    include_stop: bool = False


class Stream:
    """Deltas of one answer, once over, with `for` or with `async for`. Raises the TriptychError that ended it.

    Leaving either loop early aborts the request.
    """

    def __init__(
        self, request_id: str, text: Text, ending: Ending, abort: Callable[[str], None], calls: CallSyntax | None = None
    ) -> None:
        """calls: how the model writes calls of tools, where there are any; stop strings end what is said, not these."""
        self.request_id = request_id
        self._text = text
        self._detokenizer = text.detokenizer(shown=calls.words if calls else "")
        self._calls = None if calls is None else CallReader(calls)
        self._stops = StopStrings(ending.stop, include=ending.include_stop)
        self._abort = abort
        self._queue: SimpleQueue[Delta] = SimpleQueue()
        self._notify: Callable[[], object] = lambda: None
        self._num_tokens = 0
        self._detokenize_s = 0.0
        self._stopped_at: str | None = None
        self._is_over = False

    def push(self, delta: Delta) -> None:
        """The engine's courier hands over a delta."""
        self._queue.put(delta)
        with contextlib.suppress(RuntimeError):  # the reader's event loop may be closed already
            self._notify()

    def abort(self) -> None:
        """Ask the engine to forget the request; the stream still ends with its last delta."""
        self._abort(self.request_id)

    def answer(self) -> Answer:
        """Wait for the whole answer."""
        deltas = list(self)
        last = deltas[-1]
        assert last.finish is not None
        assert last.usage is not None
        assert last.timing is not None
        return Answer(
            text="".join(delta.text for delta in deltas),
            calls=_whole([piece for delta in deltas for piece in delta.calls]),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish=last.finish,
            usage=last.usage,
            timing=last.timing,
        )

    def __iter__(self) -> Iterator[TextDelta]:
        try:
            while not self._is_over:
                yield from self._timed(self._queue.get())
        finally:
            self.leave()

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._notify = functools.partial(loop.call_soon_threadsafe, arrived.set)
        try:
            while not self._is_over:
                while not self._is_over and not self._queue.empty():
                    for delta in self._timed(self._queue.get_nowait()):
                        yield delta
                if not self._is_over:
                    await arrived.wait()
                    arrived.clear()
        finally:
            self.leave()

    def leave(self) -> None:
        """Nobody will read on: abort what is unfinished."""
        if not self._is_over:
            self.abort()

    # ── one delta ──────────────────────────────────────────────────────────────────────────────────────────────

    def _timed(self, delta: Delta) -> list[TextDelta]:
        began_s = time.perf_counter()
        deltas = self._read(delta)
        self._detokenize_s += time.perf_counter() - began_s
        return deltas

    def _read(self, delta: Delta) -> list[TextDelta]:
        if delta.finish is not None:
            self._is_over = True
        if self._stopped_at is not None:
            return [] if delta.finish is None else [self._ended(delta, "", FinishReason.STOP, self._stopped_at)]
        if delta.finish is FinishReason.ERROR:
            raise delta.error or BackendError("the engine gave no reason")
        self._num_tokens += len(delta.token_ids)
        if delta.finish is None:
            return self._went_on(delta)
        is_stop = delta.finish is FinishReason.STOP
        spoken = delta.token_ids[:-1] if is_stop else delta.token_ids  # the end token has no text
        text = self._detokenizer.push(spoken) + self._detokenizer.flush(has_ended=is_stop)
        text, calls = self._split(text, is_last=True)
        text, match = self._stops.push(text)
        if match is not None:
            return [self._ended(delta, text, FinishReason.STOP, match)]
        reason = delta.token_ids[-1] if is_stop and delta.token_ids[-1] not in self._text.eos_ids else None
        last = self._ended(delta, text + self._stops.flush(), delta.finish, reason)
        return [last.but(calls=calls)]

    def _went_on(self, delta: Delta) -> list[TextDelta]:
        text, calls = self._split(self._detokenizer.push(delta.token_ids))
        text, self._stopped_at = self._stops.push(text)
        if self._stopped_at is not None:
            calls = ()
            self.abort()
        elif calls:
            text += self._stops.flush()
        logprobs = tuple(self._logprob(logprob) for logprob in delta.logprobs)
        return [
            TextDelta(
                text=text,
                calls=calls,
                token_ids=delta.token_ids,
                logprobs=logprobs,
                prompt_logprobs=self._prompt_logprobs(delta),
            )
        ]

    def _ended(self, delta: Delta, text: str, finish: FinishReason, stop_reason: str | int | None) -> TextDelta:
        assert delta.usage is not None
        is_stop_token = delta.finish is FinishReason.STOP
        is_late = self._stopped_at is not None  # tokens that came after the stop string are nobody's
        spoken = () if is_late else delta.logprobs[: len(delta.logprobs) - is_stop_token]
        return TextDelta(
            text=text,
            token_ids=() if is_late else delta.token_ids,
            logprobs=tuple(self._logprob(logprob) for logprob in spoken),
            finish=finish,
            stop_reason=stop_reason,
            prompt_logprobs=self._prompt_logprobs(delta),
            usage=dataclasses.replace(delta.usage, completion_tokens=self._num_tokens),
            timing=delta.timing,
            detokenize_s=self._detokenize_s,
        )

    def _split(self, text: str, *, is_last: bool = False) -> tuple[str, tuple[CallDelta, ...]]:
        """What is said and what is called."""
        if self._calls is None:
            return text, ()
        said, calls = self._calls.push(text)
        rest, more = self._calls.flush() if is_last else ("", ())
        return said + rest, calls + more

    def _prompt_logprobs(self, delta: Delta) -> Spelled | None:
        known = delta.prompt_logprobs
        if known is None:
            return None
        return functools.cache(lambda: tuple(None if one is None else self._logprob(one) for one in known))

    def _logprob(self, logprob: TokenLogprob) -> TextLogprob:
        top = tuple(self._named(token_id, value) for token_id, value in logprob.top)
        return self._named(logprob.token_id, logprob.logprob).but(top=top)

    def _named(self, token_id: int, value: float) -> TextLogprob:
        raw = self._text.token_bytes(token_id)
        return TextLogprob(token_id=token_id, token=raw.decode("utf-8", "replace"), token_bytes=raw, logprob=value)


def _whole(pieces: Sequence[CallDelta]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=first.id or "",
            name=first.name,
            arguments="".join(piece.arguments for piece in pieces if piece.index == first.index),
        )
        for first in pieces
        if first.name is not None
    )
