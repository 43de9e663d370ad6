"""What a caller of `/v1/responses` gets back: the response, its items, and its events."""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.core.request import FinishReason, Usage
from triptych.server.dialect import Block, Choice, Reply
from triptych.server.openai import answers
from triptych.server.openai.answers import TokenLogprobAnswer, Trace
from triptych.server.responses.bodies import ResponsesBody

Logprobs = list[TokenLogprobAnswer]  # of all of an answer's tokens


class OutputTextPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: Logprobs = []


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    status: str
    content: list[OutputTextPart]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int  # ours; may overlap with cached_tokens


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response, whole or under way; what was asked is repeated as OpenAI repeats it."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[MessageItem | CallItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: None = None
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    triptych: Trace | None = None


def response(reply: Reply, status: str, **more: Any) -> ResponseAnswer:
    """What `more` leaves open is as it was asked."""
    ask, body = reply.ask, reply.ask.said
    assert isinstance(body, ResponsesBody)
    return ResponseAnswer(
        id=reply.id,
        created_at=reply.created_s,
        status=status,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=reply.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=ask.or_default("temperature", body.temperature, 1.0),
        text={"format": msgspec.to_builtins(body.text.format) if body.text and body.text.format else {"type": "text"}},
        tool_choice=msgspec.to_builtins(body.tool_choice) or "auto",
        tools=msgspec.to_builtins(body.tools or []),
        top_logprobs=body.top_logprobs or 0,
        top_p=ask.or_default("top_p", body.top_p, 1.0),
        metadata=body.metadata or {},
        **{"output": [], **more},
    )


def ended(reply: Reply, logprobs: Logprobs) -> ResponseAnswer:
    """The response whose answer has ended."""
    (choice,) = reply.choices
    is_cut = choice.finish is FinishReason.LENGTH
    blocks = choice.blocks or [Block()]
    return response(
        reply,
        "incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        output=[item(reply, index, status_of(choice, index), logprobs) for index in range(len(blocks))],
        usage=bill(reply.usage()),
        triptych=answers.trace(choice.usage, choice.timing),
    )


def status_of(choice: Choice, index: int) -> str:
    """Of the item that block `index` makes: what the limit cut is incomplete."""
    is_cut = choice.finish is FinishReason.LENGTH and index >= len(choice.blocks) - 1
    return "incomplete" if is_cut else "completed"


def item_id(reply: Reply, index: int, block: Block) -> str:
    return f"{'msg' if block.name is None else 'fc'}_{reply.id.partition('_')[2]}{index}"


def item(reply: Reply, index: int, status: str, logprobs: Logprobs) -> MessageItem | CallItem:
    """Block `index` of the answer; with the status `in_progress`, as it was when it began."""
    (choice,) = reply.choices
    block = choice.blocks[index] if choice.blocks else Block()
    id, is_new = item_id(reply, index, block), status == "in_progress"
    if block.name is None:
        return MessageItem(id=id, status=status, content=[] if is_new else [part(choice, block, logprobs)])
    arguments = "" if is_new else block.text
    return CallItem(id=id, status=status, call_id=block.call_id or "", name=block.name, arguments=arguments)


def part(choice: Choice, block: Block, logprobs: Logprobs) -> OutputTextPart:
    """A text with the tokens' probabilities, which are all with the answer's first text."""
    is_first = next((one for one in choice.blocks if one.name is None), block) is block
    return OutputTextPart(text=block.text, logprobs=logprobs if is_first else [])


def bill(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens, image_tokens=usage.image_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
