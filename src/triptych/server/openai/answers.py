"""What a caller gets back: records as OpenAI spells them, and our own `triptych` beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from triptych.core.request import Timing, Usage
from triptych.server.dialect import Reply
from triptych.session import TextLogprob


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int  # may overlap with image_tokens: never subtract both
    image_tokens: int
    audio_tokens: int = 0


class UsageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Our extension: where one answer's time went, in seconds, and what its pictures found in the cache."""

    queue_s: float
    encode_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    tokens_per_s: float | None  # of decoding; None for a single token
    encoder_hits: int
    encoder_misses: int


class TokenLogprobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprobAnswer] | msgspec.UnsetType = msgspec.UNSET


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[TokenLogprobAnswer]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Null at the prompt's first token, which nothing precedes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's. rank: among all tokens, 1 the likeliest; null where it is beyond those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # null at the first token and at a picture's


class FunctionAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is called; of a chunk that goes on with a call, more of its arguments."""

    name: str | None = None
    arguments: str


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionAnswer


class CallChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionAnswer


class ChatMessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[CallAnswer] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallChunk] | None = None


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a chat. `stop_reason` (vLLM's) is the stop string or token id that ended it."""

    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    triptych: Trace | None


class ChoiceChunk(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | msgspec.UnsetType = msgspec.UNSET
    triptych: Trace | None | msgspec.UnsetType = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a text completion, whole or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    triptych: Trace | None | msgspec.UnsetType = msgspec.UNSET


class Answer(msgspec.Struct, kw_only=True):
    """The envelope of every answer and of every chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]  # ChoiceAnswer, ChoiceChunk or TextChoice
    usage: UsageAnswer | None | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET  # of a chat


def trace(usage: Usage | None, timing: Timing | None) -> Trace | None:
    if usage is None or timing is None:
        return None
    later = usage.completion_tokens - 1
    return Trace(
        queue_s=round(timing.queue_s, 6),
        encode_s=round(timing.encode_s, 6),
        prefill_s=round(timing.prefill_s, 6),
        decode_s=round(timing.decode_s, 6),
        ttft_s=round(timing.queue_s + timing.prefill_s, 6),
        tokens_per_s=round(later / timing.decode_s, 2) if later > 0 and timing.decode_s > 0 else None,
        encoder_hits=usage.encoder_hits,
        encoder_misses=usage.encoder_misses,
    )


def bill(usage: Usage) -> UsageAnswer:
    return UsageAnswer(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=usage.cached_tokens, image_tokens=usage.image_tokens),
    )


def envelope(reply: Reply, kind: str) -> Answer:
    """An answer or chunk with no choices yet."""
    return Answer(
        id=reply.id,
        object=kind,
        created=reply.created_s,
        model=reply.model,
        system_fingerprint=reply.fingerprint,
        choices=[],
    )


def chat_logprobs(logprobs: Iterable[TextLogprob]) -> ChatLogprobs:
    def spelt(one: TextLogprob, **top: list[TokenLogprobAnswer]) -> TokenLogprobAnswer:
        return TokenLogprobAnswer(token=one.token, logprob=one.logprob, bytes=list(one.token_bytes), **top)

    return ChatLogprobs(content=[spelt(one, top_logprobs=[spelt(other) for other in one.top]) for one in logprobs])


def completion_logprobs(
    logprobs: Iterable[TextLogprob | None], *, offset: int, tokens: Sequence[str] = ()
) -> CompletionLogprobs:
    """offset: characters of text before the first of these tokens; tokens: their texts, where some have no more."""
    answer = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for at, one in enumerate(logprobs):
        token = tokens[at] if one is None else one.token
        answer.tokens.append(token)
        answer.token_logprobs.append(None if one is None else one.logprob)
        answer.top_logprobs.append(
            None if one is None else {other.token: other.logprob for other in one.top} | {token: one.logprob}
        )
        answer.text_offset.append(offset)
        offset += len(token)
    return answer


def prompt_logprobs(spelled: Callable[[], Iterable[TextLogprob | None]] | None) -> PromptLogprobs | msgspec.UnsetType:
    if spelled is None:
        return msgspec.UNSET
    return [None if one is None else _ranked(one) for one in spelled()]


def _ranked(one: TextLogprob) -> dict[int, PromptLogprob]:
    """The token itself and the likeliest, by their ids."""
    ranks = {other.token_id: rank for rank, other in enumerate(one.top, start=1)}
    return {
        other.token_id: PromptLogprob(logprob=other.logprob, rank=ranks.get(other.token_id), decoded_token=other.token)
        for other in (one, *one.top)
    }
