"""How an endpoint speaks: a dialect reads bodies and writes answers, whole or as events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from triptych.core.chat import ToolCall
from triptych.core.request import FinishReason, Timing, Usage
from triptych.server.ask import Ask
from triptych.session import Prompt, TextDelta, TextLogprob


class Dialect(Protocol):
    """How one endpoint reads bodies and writes answers; `Endpoint` does all that is the same for every one of them.

    A body becomes an `Ask`. Its answers grow as `Choice`s of one `Reply`: `Choice.take` has been given each delta
    before the dialect sees it, so a writer finds what there is so far in the reply, and what is new in the delta.
    """

    @property
    def prefix(self) -> str:
        """What an answer's id begins with."""

    @property
    def prompt_field(self) -> str:
        """What holds the prompt in a body, for errors that name it."""

    def read(self, content: dict[str, Any]) -> Ask:
        """What a body asks. Raises RequestError."""

    def whole(self, reply: Reply) -> msgspec.Struct:
        """The body of a reply whose answers have all ended."""

    def writer(self, reply: Reply) -> Writer:
        """A writer for one stream; it may keep what it needs to know of the events before."""


class Writer(Protocol):
    """The events of one stream, in order. Nothing is written before the first delta: an early failure is a status."""

    def write(self, index: int, delta: TextDelta) -> Iterable[Event]:
        """What a delta of answer number `index` is worth."""

    def end(self) -> Iterable[Event]:
        """What follows the last delta of the last answer."""

    def fail(self, error: Exception) -> Iterable[Event]:
        """What ends a stream that cannot go on, possibly before its first delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event. name: of its `event:` line, where the dialect has names; data: JSON, or plain text."""

    data: msgspec.Struct | Mapping[str, Any] | str
    name: str | None = None


@dataclass(slots=True, kw_only=True)
class Block:
    """A stretch of an answer: text, or a tool call, which has an id and a name and whose text is its arguments."""

    call_id: str | None = None
    name: str | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt that its answer begins with. tokens: each one's own text, where probabilities were asked for."""

    text: str = ""
    tokens: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer while it grows."""

    prompt_tokens: int
    echo: Echo = Echo()
    blocks: list[Block] = field(default_factory=list)  # in the order in which they came
    num_characters: int = 0  # of its text
    num_tokens: int = 0
    logprobs: list[TextLogprob] = field(default_factory=list)
    prompt_logprobs: Callable[[], Sequence[TextLogprob | None]] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    timing: Timing | None = None

    @property
    def finish_reason(self) -> str:
        assert self.finish is not None, "an answer is written once it has ended"
        return self.finish.value

    @property
    def text(self) -> str:
        return self.echo.text + "".join(block.text for block in self.blocks if block.name is None)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(id=block.call_id or "", name=block.name, arguments=block.text)
            for block in self.blocks
            if block.name is not None
        )

    def take(self, delta: TextDelta) -> None:
        """Text comes before the calls of the same delta; a call with a name begins a block."""
        if delta.text:
            if not self.blocks or self.blocks[-1].name is not None:
                self.blocks.append(Block())
            self.blocks[-1].texts.append(delta.text)
        for call in delta.calls:
            if call.name is not None:
                self.blocks.append(Block(call_id=call.id, name=call.name))
            self.blocks[-1].texts.append(call.arguments)
        self.num_characters += len(delta.text)
        self.num_tokens += len(delta.token_ids)
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason
            self.usage, self.timing = delta.usage, delta.timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What every form of one reply is made of.

    ask: without what its prompts were made of. prompts: until they are started; a slow reader keeps neither files nor
    tiles. choices: by index, `ask.num_choices` to a prompt.
    """

    id: str
    created_s: int  # since 1970
    model: str
    fingerprint: str
    ask: Ask
    prompts: list[Prompt]
    choices: Sequence[Choice]

    def usage(self) -> Usage:
        """The bill so far: each prompt once, each answer in full. What was cached is known once an answer has ended."""
        known = [choice.usage or _so_far(choice) for choice in self.choices]
        prompts = known[:: self.ask.num_choices]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            image_tokens=sum(usage.image_tokens for usage in prompts),
            completion_tokens=sum(usage.completion_tokens for usage in known),
        )


def _so_far(choice: Choice) -> Usage:
    return Usage(
        prompt_tokens=choice.prompt_tokens, cached_tokens=0, image_tokens=0, completion_tokens=choice.num_tokens
    )
