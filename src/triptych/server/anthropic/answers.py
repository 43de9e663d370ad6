"""What a caller of `/v1/messages` gets back: the message, its blocks, and its events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from triptych.core.request import FinishReason, Usage
from triptych.server import dialect
from triptych.server.dialect import Choice, Reply
from triptych.server.openai import answers
from triptych.server.openai.answers import Trace


class TextOut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ToolUseOut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The three kinds of input tokens together are the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextOut | ToolUseOut]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    triptych: Trace | None | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int


def begun(reply: Reply) -> MessageAnswer:
    """The message before its first block: what was cached of its prompt is told at the end."""
    (choice,) = reply.choices
    usage = MessageUsage(input_tokens=choice.prompt_tokens, cache_read_input_tokens=0, output_tokens=1)
    return MessageAnswer(id=reply.id, model=reply.model, content=[], stop_reason=None, stop_sequence=None, usage=usage)


def ended(reply: Reply) -> MessageAnswer:
    (choice,) = reply.choices
    return MessageAnswer(
        id=reply.id,
        model=reply.model,
        content=[_block(block) for block in choice.blocks],
        stop_reason=stop_reason(reply),
        stop_sequence=stop_sequence(choice),
        usage=bill(reply.usage()),
        triptych=answers.trace(choice.usage, choice.timing),
    )


def stop_reason(reply: Reply) -> str:
    """Why the message ended, in Anthropic's words."""
    (choice,) = reply.choices
    if choice.finish is FinishReason.LENGTH:
        num_tokens, limit = reply.usage().completion_tokens, reply.ask.max_tokens
        return "max_tokens" if limit is None or num_tokens >= limit else "model_context_window_exceeded"
    if choice.calls:
        return "tool_use"
    return "end_turn" if stop_sequence(choice) is None else "stop_sequence"


def stop_sequence(choice: Choice) -> str | None:
    return choice.stop_reason if isinstance(choice.stop_reason, str) else None


def bill(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _block(block: dialect.Block) -> TextOut | ToolUseOut:
    if block.name is None:
        return TextOut(text=block.text)
    return ToolUseOut(id=block.call_id or "", name=block.name, input=_arguments(block.text))


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments; those that `max_tokens` cut are no JSON, and go under the name that Anthropic gives such."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
