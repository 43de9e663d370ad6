"""Text completions: a text or token ids in, their continuation out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triptych.errors import RequestError
from triptych.server.ask import Ask, Source, bills_each, prompt_logprobs, wants_usage
from triptych.server.body import compression, convert
from triptych.server.dialect import Choice, Reply
from triptych.server.openai import answers, fields
from triptych.server.openai.answers import Answer, CompletionLogprobs, TextChoice
from triptych.server.openai.bodies import CompletionBody
from triptych.server.openai.chunks import ChunkWriter
from triptych.server.openai.form import asked
from triptych.session import TextDelta, TextLogprob

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    """How `/v1/completions` reads a body and writes answers."""

    prefix = "cmpl-"
    prompt_field = "prompt"

    def read(self, content: dict[str, Any]) -> Ask:
        body = convert(content, fields.COMPLETION)
        echoed = body.logprobs if body.echo else None  # of the prompt's own tokens, as the answer's
        counts = [count for count in (echoed, prompt_logprobs(body)) if count is not None]
        return Ask(
            body=body,
            prompts=_prompts(body),
            max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
            num_logprobs=body.logprobs,
            num_prompt_logprobs=max(counts, default=None),
            num_choices=body.n or 1,
            wants_usage=wants_usage(body),
            bills_each=bills_each(body),
            compression=compression(body.triptych),
            form=asked(body),
            echo=bool(body.echo),
        )

    def whole(self, reply: Reply) -> Answer:
        answer = answers.envelope(reply, "text_completion")
        answer.usage = answers.bill(reply.usage())
        answer.choices = [
            TextChoice(
                index=index,
                text=choice.text,
                logprobs=None if reply.ask.num_logprobs is None else _logprobs(choice),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=answers.prompt_logprobs(choice.prompt_logprobs),
                triptych=answers.trace(choice.usage, choice.timing),
            )
            for index, choice in enumerate(reply.choices)
        ]
        return answer

    def writer(self, reply: Reply) -> ChunkWriter:
        return ChunkWriter(reply, "text_completion", self)

    def opening(self, index: int, choice: Choice) -> list[TextChoice]:
        echoed = _echoed(choice)
        logprobs = answers.completion_logprobs(echoed, offset=0, tokens=choice.echo.tokens) if echoed else None
        return [TextChoice(index=index, text=choice.echo.text, logprobs=logprobs)] if choice.echo.text else []

    def pieces(self, index: int, delta: TextDelta, choice: Choice) -> list[TextChoice]:
        if not delta.text and not delta.logprobs and delta.finish is None:
            return []
        offset = sum(map(len, choice.echo.tokens)) + choice.num_characters - len(delta.text)
        logprobs = answers.completion_logprobs(delta.logprobs, offset=offset) if delta.logprobs else None
        if delta.finish is None:
            return [TextChoice(index=index, text=delta.text, logprobs=logprobs)]
        ending = TextChoice(
            index=index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish.value,
            stop_reason=delta.stop_reason,
            triptych=answers.trace(delta.usage, delta.timing),
        )
        return [ending]


def _echoed(choice: Choice) -> Sequence[TextLogprob | None]:
    """Of the prompt's tokens, where the answer begins with them."""
    return choice.prompt_logprobs() if choice.echo.tokens and choice.prompt_logprobs is not None else ()


def _logprobs(choice: Choice) -> CompletionLogprobs:
    known = [*_echoed(choice), *choice.logprobs]
    return answers.completion_logprobs(known, offset=0, tokens=choice.echo.tokens)


def _prompts(body: CompletionBody) -> tuple[Source, ...]:
    """One text, one list of ids, or a list of either. Raises RequestError on a mixture."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError("`prompt` is an empty list", hint="send a text or token ids", param="prompt")
    if all(isinstance(one, int) for one in prompt):
        return (tuple(one for one in prompt if isinstance(one, int)),)
    if any(isinstance(one, int) for one in prompt):
        raise RequestError(
            "`prompt` mixes token ids with texts or lists",
            hint="send one list of token ids, or a list of prompts",
            param="prompt",
        )
    return tuple(one if isinstance(one, str) else tuple(one) for one in prompt if not isinstance(one, int))
