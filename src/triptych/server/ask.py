"""What one HTTP request asks of the engine, once its body has been read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from triptych.core.chat import Chat, Form, ImagePart
from triptych.core.policy import Compression
from triptych.core.request import Sampling
from triptych.errors import ContextError, RequestError
from triptych.server.openai.bodies import Body, ChoicesBody

Source = Chat | str | tuple[int, ...]

SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """prompts times `num_choices` answers, in the order of their indices.

    body: what all dialects can say, in OpenAI's words; said: the dialect's own body, where its answer repeats some.
    """

    body: Body
    prompts: tuple[Source, ...]
    max_tokens: int | None  # None: to the end of the context
    num_logprobs: int | None
    num_prompt_logprobs: int | None = None
    compression: Compression = Compression()
    form: Form | None = None  # None: free text
    num_choices: int = 1  # answers to each prompt
    wants_usage: bool = False  # whether a stream of chunks ends with one of usage
    bills_each: bool = False  # whether each of them has the bill so far
    is_ceiling: bool = False  # `max_tokens` may be more than the context holds; the reply says what ended it
    echo: bool = False
    said: msgspec.Struct | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)  # the checkpoint's own sampling

    @property
    def is_stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def num_images(self) -> int:
        chats = (prompt for prompt in self.prompts if isinstance(prompt, Chat))
        return sum(isinstance(part, ImagePart) for chat in chats for message in chat.messages for part in message.parts)

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.body.stop
        return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

    def sampling(self, *, prompt_tokens: int, context: int, choice: int) -> Sampling:
        """How the answer number `choice` to a prompt is sampled. Raises RequestError."""
        body = self.body
        max_tokens = self._budget(prompt_tokens, context)
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"`min_tokens` is {body.min_tokens:,}, but at most {max_tokens:,} tokens may be answered",
                hint="lower `min_tokens` or raise `max_tokens`",
                param="min_tokens",
            )
        top_k = self.or_default("top_k", body.top_k, 0)
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            temperature=self.or_default("temperature", body.temperature, 1.0),
            top_p=self.or_default("top_p", body.top_p, 1.0),
            top_k=int(top_k) if top_k > 0 else None,
            min_p=self.or_default("min_p", body.min_p, 0.0),
            repetition_penalty=self.or_default("repetition_penalty", body.repetition_penalty, 1.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=body.logit_bias or {},
            seed=None if body.seed is None else (body.seed + choice) & SEED_MASK,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            stop_ids=frozenset(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
        )

    def or_default(self, name: str, value: float | None, otherwise: float) -> float:
        return value if value is not None else self.defaults.get(name, otherwise)

    def _budget(self, prompt_tokens: int, context: int) -> int:
        room = context - prompt_tokens
        is_over = self.max_tokens is not None and self.max_tokens > room and not self.is_ceiling
        if room < 1 or is_over:
            wanted = "" if self.max_tokens is None else f" and `max_tokens` asks for {self.max_tokens:,}"
            raise ContextError(
                f"the context is {context:,} tokens; the prompt takes {prompt_tokens:,}{wanted}",
                hint=f"lower `max_tokens` to {room:,}" if room > 0 else "shorten the prompt or send fewer pictures",
                param="max_tokens" if room > 0 else "prompt",
            )
        return room if self.max_tokens is None else min(self.max_tokens, room)


def wants_usage(body: ChoicesBody) -> bool:
    """Whether a stream ends with usage. `stream_options` without a stream is a mistake that OpenAI refuses too."""
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "`stream_options` is only allowed with `stream: true`",
            hint="set `stream`, or leave `stream_options` out",
            param="stream_options",
        )
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def bills_each(body: ChoicesBody) -> bool:
    """Whether every chunk has the bill so far, which load generators count tokens by."""
    return wants_usage(body) and bool(body.stream_options and body.stream_options.continuous_usage_stats)


def prompt_logprobs(body: ChoicesBody) -> int | None:
    """How many alternatives to each token of the prompt; they come with a whole answer only, as vLLM's do."""
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            "`prompt_logprobs` is only allowed without `stream`", hint="ask for a whole answer", param="prompt_logprobs"
        )
    return body.prompt_logprobs
