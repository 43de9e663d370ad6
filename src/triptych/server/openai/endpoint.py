"""One POST endpoint: read the body, prepare, start, then answer whole or as a stream of events."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import anyio
import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from triptych.core.request import FinishReason
from triptych.errors import RequestError, TriptychError, UnavailableError
from triptych.server.metrics import Watch
from triptych.server.openai.answers import Answer, Choice, total_usage
from triptych.server.openai.ask import Ask
from triptych.server.openai.events import EventStream
from triptych.server.refusals import body_of, response_of, status_of
from triptych.server.serving import Job, Serving
from triptych.server.visit import Visit, receive_body, refuse_early
from triptych.session import Stream, TextDelta

log = logging.getLogger("triptych.server")

Sink = Callable[[int, TextDelta], Awaitable[None]]


class Dialect(Protocol):
    """How one endpoint reads bodies and writes answers."""

    @property
    def prefix(self) -> str:
        """What an answer's id begins with."""

    @property
    def objects(self) -> tuple[str, str]:
        """What a whole answer and a chunk call themselves."""

    def read(self, content: dict[str, Any]) -> Ask:
        """What a body asks. Raises RequestError."""

    def whole(self, ask: Ask, choices: Sequence[Choice]) -> list[Any]:
        """The finished answers."""

    def opening(self, index: int, echo: str) -> list[Any]:
        """The pieces before an answer's first delta."""

    def pieces(self, index: int, delta: TextDelta, *, offset: int) -> list[Any]:
        """The pieces that one delta is worth. offset: characters of the answer before it."""


class Endpoint:
    """An ASGI application for one dialect. A caller who leaves takes every answer of the request along."""

    def __init__(self, serving: Serving, dialect: Dialect) -> None:
        self._serving = serving
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await receive_body(scope, receive, self._serving.config)
        except ClientDisconnect:
            return
        except RequestError as error:
            self._serving.metrics.refused(error.status, error.code)
            await refuse_early(error, receive, send)
            return
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
        self._arrived_s = time.perf_counter()

    async def hold(self, raw: bytes) -> None:
        """Answer; whatever goes wrong becomes a refusal, or an error event once a stream has begun."""
        try:
            await self._answer(raw)
        except Exception as error:
            body = body_of(error)
            if not isinstance(error, TriptychError):
                log.exception("unexpected error", extra={"facts": {"request": self._visit.request_id}})
            self._serving.metrics.refused(status_of(error), body.error.code)
            self._visit.facts["error"] = body.error.code
            if self._events.has_begun:
                await self._events.send(body)
                await self._events.end()
            else:
                await self._reply(response_of(error))

    async def _answer(self, raw: bytes) -> None:
        ask = await self._serving.read(raw, self._dialect.read)
        id = f"{self._dialect.prefix}-{uuid.uuid4().hex}"
        self._visit.facts |= {"id": id, "stream": ask.is_stream, "images": ask.num_images}
        job = await self._serving.prepare(ask, id=id, tenant=self._visit.tenant)
        choices = [Choice(echo=job.echo(index)) for index in range(job.num_answers)]
        streams = self._serving.start(job)
        try:
            await (self._stream(job, streams, choices) if ask.is_stream else self._whole(job, streams, choices))
        finally:
            self._serving.end(streams, num_unfinished=sum(choice.finish is None for choice in choices))
        usage = total_usage(choices, num_choices=ask.num_choices)
        self._visit.facts |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish": ",".join(choice.finish.value for choice in choices if choice.finish),
        }

    async def _whole(self, job: Job, streams: Sequence[Stream], choices: list[Choice]) -> None:
        async def wait(index: int, delta: TextDelta) -> None: ...

        await self._follow(streams, choices, wait)
        answer = self._envelope(job, self._dialect.objects[0])
        answer.choices = self._dialect.whole(job.ask, choices)
        answer.usage = total_usage(choices, num_choices=job.ask.num_choices)
        await self._reply(Response(msgspec.json.encode(answer), media_type="application/json"))

    async def _stream(self, job: Job, streams: Sequence[Stream], choices: list[Choice]) -> None:
        chunk = self._envelope(job, self._dialect.objects[1])
        chunk.usage = None if job.ask.wants_usage else msgspec.UNSET
        unopened = set(range(len(streams)))

        async def write(index: int, delta: TextDelta) -> None:
            pieces = []
            if index in unopened:
                unopened.remove(index)
                pieces += self._dialect.opening(index, choices[index].echo)
            pieces += self._dialect.pieces(index, delta, offset=choices[index].num_characters - len(delta.text))
            for piece in pieces:
                chunk.choices = [piece]
                await self._events.send(chunk)

        failure: list[Exception] = []
        async with anyio.create_task_group() as group:
            group.start_soon(self._events.keep_open, self._serving.config.ping_s)
            try:
                await self._follow(streams, choices, write)
            except Exception as error:  # carried out by hand: a task group would wrap it
                failure.append(error)
            group.cancel_scope.cancel()
        if failure:
            raise failure[0]
        if job.ask.wants_usage:
            chunk.choices = []
            chunk.usage = total_usage(choices, num_choices=job.ask.num_choices)
            await self._events.send(chunk)
        await self._events.end(b"data: [DONE]\n\n")

    async def _follow(self, streams: Sequence[Stream], choices: list[Choice], sink: Sink) -> None:
        """Drain every stream at once, each delta into its choice and then into `sink`. Raises what a stream raises."""
        watches = [Watch(self._serving.metrics, self._arrived_s) for _ in streams]
        group = anyio.create_task_group()
        failures: list[Exception] = []

        async def pump(index: int, stream: Stream) -> None:
            async for delta in stream:
                if delta.finish is FinishReason.ABORT:
                    raise UnavailableError("the server is stopping and ended this answer", hint="ask again in a moment")
                watches[index].see(delta)
                choices[index].take(delta)
                await sink(index, delta)

        async def pump_one(index: int, stream: Stream) -> None:
            try:
                await pump(index, stream)
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()

        if len(streams) == 1:
            await pump(0, streams[0])
            return
        async with group:
            for index, stream in enumerate(streams):
                group.start_soon(pump_one, index, stream)
        if failures:
            raise failures[0]

    def _envelope(self, job: Job, kind: str) -> Answer:
        return Answer(
            id=job.id,
            object=kind,
            created=int(time.time()),
            model=job.ask.body.model or self._serving.names[0],
            system_fingerprint=self._serving.fingerprint,
            choices=[],
        )

    async def _reply(self, response: Response) -> None:
        await response(self._scope, _read_nothing, self._send)


async def _leave_with_caller(receive: Receive, answering: anyio.CancelScope) -> None:
    """Wait until the caller hangs up, then cancel what is being done for it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def _read_nothing() -> Message:
    raise AssertionError("a plain response reads nothing")
