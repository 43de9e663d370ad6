"""What all endpoints share: session, names, threads that prepare, answers under way."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from triptych.core.chat import Chat
from triptych.core.request import FinishReason, Guide
from triptych.engine.stats import EngineStats
from triptych.errors import ModelNotFoundError, RequestError, UnavailableError
from triptych.server.ask import Ask, Source
from triptych.server.body import parse
from triptych.server.config import ServerConfig
from triptych.server.dialect import Choice, Echo, Reply
from triptych.server.limits import in_time
from triptych.server.metrics import Metrics
from triptych.server.openai.bodies import MAX_LOGPROBS, Body
from triptych.server.threads import Threads
from triptych.server.visit import Visit
from triptych.session import Ending, Inspection, Prompt, Session, Stream, Terms

INLINE_BYTES = 64 << 10  # a larger body is parsed in a thread
MAX_PROBABILITIES = 1 << 18  # of one request; an answer that fills the context may have all that belong to it
Value = TypeVar("Value")


class Serving:
    """The server's one changing thing. All methods are called on the event loop and none blocks it."""

    def __init__(self, session: Session, config: ServerConfig) -> None:
        self.session = session
        self.config = config
        self.names = config.model_names or (session.name,)
        self.fingerprint = f"triptych-{session.manifest.weights_digest[:12]}"
        self.metrics = Metrics(session, self.names[0])
        self.is_draining = False
        self._is_cut = False  # the drain is over: nothing may begin
        self._live: set[Stream] = set()
        self.texts = Threads(config.text_threads, max_waiting=config.max_preparing)
        self._forms = Threads(config.text_threads, max_waiting=config.max_preparing)
        self._media = Threads(config.media_threads, max_waiting=config.max_preparing)
        self.writers = Threads(config.text_threads, max_waiting=sys.maxsize)  # what is answered already is not refused

    async def read(self, raw: bytes, read: Callable[[dict[str, Any]], Ask]) -> Ask:
        """What a body asks of this server. Raises RequestError."""
        ask = await self.parse(raw, read)
        self.check(ask)
        return replace(ask, defaults=self.session.manifest.generation)

    async def parse(self, raw: bytes, read: Callable[[dict[str, Any]], Value]) -> Value:
        """What `read` makes of a body; of a large one in a thread. Raises RequestError."""
        if self.is_draining:
            raise UnavailableError("the server is stopping", hint="ask again in a moment")
        if len(raw) <= INLINE_BYTES:
            return read(parse(raw))
        return await self.texts.run(lambda: read(parse(raw)))

    def check(self, ask: Ask) -> None:
        """Raises RequestError for what this server does not serve, or not so much of."""
        if ask.body.model:
            self.check_name(ask.body.model)
        if (ask.body.priority or 0) < self.config.min_priority:
            raise RequestError(
                f"`priority` is {ask.body.priority}, the most urgent here is {self.config.min_priority}",
                hint="a higher number waits for others; the operator may allow less with --min-priority",
                param="priority",
            )
        answers = len(ask.prompts) * ask.num_choices
        if answers > self.config.max_choices:
            raise RequestError(
                f"{len(ask.prompts):,} prompts times `n` = {ask.num_choices} are {answers:,} answers, "
                f"the limit is {self.config.max_choices:,}",
                hint="ask in several requests",
                param="n",
            )

    def check_name(self, model: str) -> None:
        """Raises ModelNotFoundError."""
        if model not in self.names:
            served = ", ".join(f"`{name}`" for name in self.names)
            raise ModelNotFoundError(f"model `{model[:100]}` is not served", hint=f"use {served}", param="model")

    async def prepare(self, ask: Ask, *, id: str, visit: Visit) -> Reply:
        """Fetch, decode and tokenise, in threads. Raises RequestError."""
        with self.metrics.preparing(ask.num_images):
            reply = await self._while_it_may(ask, visit, partial(self._prepare, ask, id, _tenant(ask, visit)))
        for prompt in reply.prompts:
            self.metrics.spent(prompt.spent)
        return reply

    async def inspect(self, ask: Ask, visit: Visit) -> Inspection:
        """A dry run of a chat's `prepare`. Raises RequestError."""
        (chat,) = ask.prompts
        assert isinstance(chat, Chat)
        tenant = _tenant(ask, visit)
        work = partial(self.session.inspect, chat, tenant=tenant, compression=ask.compression, form=ask.form)
        return await self._while_it_may(ask, visit, work)

    async def token_ids(self, ask: Ask, visit: Visit) -> list[int]:
        """The only prompt of an ask, as its tokenizer has it. Raises RequestError."""
        (source,) = ask.prompts
        work = partial(self.session.token_ids, source, tenant=_tenant(ask, visit), compression=ask.compression)
        return await self._while_it_may(ask, visit, work)

    def start(self, reply: Reply, visit: Visit) -> list[Stream]:
        """Queue every answer of a reply, or none. Raises RequestError, OverloadError and UnavailableError."""
        if self._is_cut:
            raise UnavailableError("the server is stopping", hint="ask again in a moment")
        streams: list[Stream] = []
        ask, body = reply.ask, reply.ask.body
        self._check_probabilities(reply)
        terms = Terms(caller=visit.caller, priority=body.priority or 0, deadline_s=visit.left_s)
        ending = Ending(stop=ask.stops, include_stop=bool(body.include_stop_str_in_output))
        try:
            for prompt in reply.prompts:
                context = self.session.context_of(prompt)
                for choice in range(ask.num_choices):
                    sampling = ask.sampling(prompt_tokens=prompt.num_tokens, context=context, choice=choice)
                    id = f"{reply.id}-{len(streams)}"
                    streams.append(self.session.start(prompt, sampling, ending=ending, request_id=id, terms=terms))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        finally:
            reply.prompts.clear()
        self._live.update(streams)
        visit.spend(reply.usage().prompt_tokens)
        return streams

    def _check_probabilities(self, reply: Reply) -> None:
        """Raises RequestError where they would fill the memory: with each token come those of some others."""
        ask, context = reply.ask, self.session.plan.max_model_len
        of_prompt, of_answer = (0 if top is None else 1 + top for top in (ask.num_prompt_logprobs, ask.num_logprobs))
        number = ask.num_choices * sum(
            of_prompt * prompt.num_tokens + of_answer * min(ask.max_tokens or context, context - prompt.num_tokens)
            for prompt in reply.prompts
        )
        most = max(MAX_PROBABILITIES, (1 + MAX_LOGPROBS) * context)
        if number > most:
            raise RequestError(
                f"{number:,} probabilities are asked for, the limit is {most:,}",
                hint="ask for fewer answers, prompts or tokens at once, or for fewer alternatives to each token",
                param="logprobs" if of_answer else "prompt_logprobs",
            )

    def end(self, streams: list[Stream], *, num_unfinished: int, reason: FinishReason) -> None:
        """Abort what is unfinished, and count it by the reason."""
        for stream in streams:
            stream.abort()
        self.metrics.finished(reason.value, num_unfinished)
        self._live.difference_update(streams)

    def state(self, stats: EngineStats) -> str:
        """In a word: the engine's thread lives, and moves while it has work, or it is not `ok`."""
        if not stats.is_alive:
            return "dead"
        if stats.since_progress_s > self.config.stall_s:
            return "stalled"
        return "draining" if self.is_draining else "ok"

    def abort_all(self) -> None:
        """The drain took too long: every answer under way ends with an error, and none begins."""
        self._is_cut = True
        for stream in list(self._live):
            stream.abort()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def _prepare(self, ask: Ask, id: str, tenant: str) -> Reply:
        """A reply of which nothing is written yet."""
        is_chat = isinstance(ask.prompts[0], Chat)
        guide = None if ask.form is None or is_chat else self.session.guide(ask.form)
        prompts = [self._prepare_one(source, tenant, ask, guide) for source in ask.prompts]
        echoes = [self._echo(ask, *pair) for pair in zip(ask.prompts, prompts, strict=True)]
        choices = [
            Choice(echo=echo, prompt_tokens=prompt.num_tokens)
            for echo, prompt in zip(echoes, prompts, strict=True)
            for _ in range(ask.num_choices)
        ]
        return Reply(
            id=id,
            created_s=int(time.time()),
            model=ask.body.model or self.names[0],
            fingerprint=self.fingerprint,
            ask=replace(ask, prompts=(), body=msgspec.convert(ask.body, Body, from_attributes=True)),
            prompts=prompts,
            choices=choices,
        )

    def _prepare_one(self, source: Source, tenant: str, ask: Ask, guide: Guide | None) -> Prompt:
        if isinstance(source, Chat):
            return self.session.prepare_chat(source, tenant=tenant, compression=ask.compression, form=ask.form)
        return self.session.prepare_text(source, tenant=tenant, compression=ask.compression, guide=guide)

    def _echo(self, ask: Ask, source: Source, prompt: Prompt) -> Echo:
        """Of a raw prompt; a chat is not echoed."""
        if not ask.echo:
            return Echo()
        text = self.session.text
        if isinstance(source, tuple):
            detokenizer = text.detokenizer()
            spoken = detokenizer.push(source) + detokenizer.flush()
        else:
            spoken = source if isinstance(source, str) else ""
        if ask.num_prompt_logprobs is None:
            return Echo(text=spoken)
        return Echo(text=spoken, tokens=tuple(map(text.token_text, prompt.token_ids.tolist())))

    async def _while_it_may(self, ask: Ask, visit: Visit, work: Callable[[], Value]) -> Value:
        """What is made of an ask's prompts, in a thread, by the request's deadline. Raises DeadlineError."""
        visit.within(ask.body.timeout)
        with in_time(visit):
            threads = self._media if ask.num_images else self.texts if ask.form is None else self._forms
            return await threads.run(work)


def _tenant(ask: Ask, visit: Visit) -> str:
    """Whose caches an ask may see: its key's, and of those its salt's."""
    return "/".join(filter(None, (visit.tenant, ask.body.cache_salt)))
