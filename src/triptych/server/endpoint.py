"""One POST endpoint: read the body, prepare, start, then answer whole or as a stream of events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Sequence

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from triptych.core.request import FinishReason
from triptych.errors import RequestError, TriptychError, UnavailableError, unwound
from triptych.server.answer import JsonAnswer
from triptych.server.dialect import Dialect, Event, Reply, Writer
from triptych.server.events import EventStream
from triptych.server.following import follow
from triptych.server.metrics import Watch
from triptych.server.refusals import code_of, response_of, status_of
from triptych.server.serving import Serving
from triptych.server.visit import Visit, receive_body
from triptych.session import Stream, TextDelta

log = logging.getLogger("triptych.server")


class Endpoint:
    """An ASGI application for one dialect. A caller who leaves takes every answer of the request along."""

    def __init__(self, serving: Serving, dialect: Dialect) -> None:
        self._serving = serving
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await receive_body(scope, receive, self._serving.config)
        async with anyio.create_task_group() as group:
            group.start_soon(_leave_with_caller, receive, group.cancel_scope)
            await _Conversation(self._serving, self._dialect, scope, send).hold(raw)
            group.cancel_scope.cancel()


class _Conversation:
    """One request from its body to its last byte."""

    def __init__(self, serving: Serving, dialect: Dialect, scope: Scope, send: Send) -> None:
        self._serving = serving
        self._dialect = dialect
        self._scope = scope
        self._send = send
        self._visit: Visit = scope["triptych.visit"]
        self._events = EventStream(send)
        self._writer: Writer | None = None  # of a stream, once its answers are under way
        self._arrived_s = time.perf_counter()

    async def hold(self, raw: bytes) -> None:
        """Answer; whatever goes wrong becomes a refusal, or an error event once a stream has begun."""
        try:
            await self._answer(raw)
        except Exception as error:
            if isinstance(error, RequestError) and error.param in ("messages", "prompt"):
                error.param = self._dialect.prompt_field
            if not isinstance(error, TriptychError):
                log.exception("unexpected error", extra={"facts": {"request": self._visit.request_id}})
            unwound(error)
            if self._writer is not None and self._events.has_begun:
                self._serving.metrics.refused(status_of(error), code_of(error))
                self._visit.facts["error"] = code_of(error)
                await self._send_all(self._writer.fail(error))
                await self._events.end()
            else:
                await self._reply(response_of(error, self._scope))

    async def _answer(self, raw: bytes) -> None:
        ask = await self._serving.read(raw, self._dialect.read)
        id = f"{self._dialect.prefix}{uuid.uuid4().hex}"
        self._visit.facts |= {"id": id, "stream": ask.is_stream, "images": ask.num_images}
        reply = await self._serving.prepare(ask, id=id, visit=self._visit)
        self._visit.stages += [one for prompt in reply.prompts for one in prompt.spent]
        streams = self._serving.start(reply, self._visit)
        reason = FinishReason.ABORT  # of answers that their caller leaves, or the drain's end cuts short
        try:
            await (self._stream(streams, reply) if ask.is_stream else self._whole(streams, reply))
        except Exception as error:
            if not isinstance(error, UnavailableError):
                reason = FinishReason.ERROR
            raise
        finally:
            num_unfinished = sum(choice.finish is None for choice in reply.choices)
            self._serving.end(streams, num_unfinished=num_unfinished, reason=reason)
        usage = reply.usage()
        self._visit.facts |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish": ",".join(choice.finish.value for choice in reply.choices if choice.finish),
        }

    async def _whole(self, streams: Sequence[Stream], reply: Reply) -> None:
        await self._follow(streams, reply)

        def write() -> Response:
            return JsonAnswer(self._dialect.whole(reply))

        is_long = (reply.ask.num_logprobs, reply.ask.num_prompt_logprobs) != (None, None)
        await self._reply(await self._serving.writers.run(write) if is_long else write())

    async def _stream(self, streams: Sequence[Stream], reply: Reply) -> None:
        self._writer = writer = self._dialect.writer(reply)
        pinging = asyncio.create_task(self._events.keep_open(self._serving.config.ping_s))
        try:
            await self._follow(streams, reply)
        finally:
            pinging.cancel()
        await self._send_all(writer.end())
        await self._events.end()

    async def _follow(self, streams: Sequence[Stream], reply: Reply) -> None:
        """Count each delta, keep it, and write it where there is a stream."""
        watches = [Watch(self._serving.metrics, self._visit.stages, self._arrived_s) for _ in streams]

        async def take(index: int, delta: TextDelta) -> None:
            watches[index].see(delta)
            self._visit.spend(len(delta.token_ids))
            reply.choices[index].take(delta)
            if self._writer is not None:
                events = self._writer.write(index, delta)
                is_long = delta.prompt_logprobs is not None
                await self._send_all(await self._serving.writers.run(lambda: list(events)) if is_long else events)

        await follow(streams, take)

    async def _send_all(self, events: Iterable[Event]) -> None:
        for event in events:
            await self._events.send(event)

    async def _reply(self, response: Response) -> None:
        await response(self._scope, _read_nothing, self._send)


async def _leave_with_caller(receive: Receive, answering: anyio.CancelScope) -> None:
    """Wait until the caller hangs up, then cancel what is being done for it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def _read_nothing() -> Message:
    raise AssertionError("a plain response reads nothing")
