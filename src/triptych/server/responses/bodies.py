"""What a caller of `/v1/responses` may send: one record for each kind of item."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from triptych.server.body import Exact, Fields, Refused
from triptych.server.openai.bodies import (
    MAX_LOGPROBS,
    MAX_TOOLS,
    Body,
    FunctionBody,
    JsonFormat,
    Positive,
    Schema,
    TextFormat,
)  # fmt: skip
from triptych.server.openai.fields import BOOKKEEPING, BOTH_REFUSED

ITEM_KINDS = ("message", "function_call", "function_call_output")
PART_KINDS = ("input_text", "input_image", "output_text")


class InputText(Exact, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(Exact, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Of a former answer, as it came back from here."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Exact, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


class InputMessage(Exact, frozen=True, kw_only=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | InputImage | OutputText], Meta(min_length=1)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(Exact, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(Exact, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[InputText | InputImage]
    id: str | None = None
    status: str | None = None


Item = InputMessage | FunctionCall | FunctionCallOutput


class FunctionTool(FunctionBody, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """What chats have one level deeper."""


class ChosenFunction(Exact, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: str


class SchemaFormat(Exact, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    name: str
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class TextConfig(Exact, frozen=True, kw_only=True):
    format: TextFormat | JsonFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    """One conversation, sent whole each time: nothing is stored here."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    metadata: dict[str, str] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # vLLM's: how pictures are shown
    include: list[str] | None = None  # `message.output_text.logprobs`; of the others there is nothing to include


_WHOLE = "nothing is stored: send the whole conversation as `input`"

RESPONSES_REFUSED: Refused = {
    **{name: BOTH_REFUSED[name] for name in ("service_tier", "store", "best_of")},
    "prompt_logprobs": ((), "/v1/chat/completions gives them"),
    "n": ((1,), "a response has one answer; ask several times, or use /v1/chat/completions"),
    "previous_response_id": ((), _WHOLE),
    "conversation": ((), _WHOLE),
    "background": ((False,), "an answer is made while its caller waits"),
    "truncation": (("disabled",), "a prompt is never cut in silence; shorten it yourself"),
    "reasoning": (
        ({}, {"effort": "none"}, {"effort": None, "summary": None}),
        "this model does not reason before it answers",
    ),
    "prompt": ((), "no prompts are stored; send the text"),
    "context_management": (([],), _WHOLE),
    "moderation": ((), "nothing is moderated here"),
    "max_tokens": ((), "it is called `max_output_tokens` here"),
    "messages": ((), "they are called `input` here"),
    "response_format": ((), "it is called `text.format` here"),
    "stream_options": (({}, {"include_obfuscation": False}), "a response's stream always ends with its usage"),
}

RESPONSES = Fields(
    record=ResponsesBody,
    ignored=BOOKKEEPING - {"metadata", "parallel_tool_calls"} | {"max_tool_calls"},  # of tools that run on a server
    refused=RESPONSES_REFUSED,
)
