"""What a caller of `/v1/responses` may send: one record for each kind of item."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triptych.server.body import Fields, Refused
from triptych.server.openai.bodies import MAX_LOGPROBS, MAX_TOOLS, Body, Positive, Schema, ToolName
from triptych.server.openai.fields import BOOKKEEPING, BOTH_REFUSED

ITEM_KINDS = ("message", "function_call", "function_call_output")
PART_KINDS = ("input_text", "input_image", "output_text")


class InputText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text", forbid_unknown_fields=True
):
    text: str


class OutputText(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text", forbid_unknown_fields=True
):
    """Of a former answer, as it came back from here."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_image", forbid_unknown_fields=True
):
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


class InputMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message", forbid_unknown_fields=True
):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call", forbid_unknown_fields=True
):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call_output", forbid_unknown_fields=True
):
    call_id: str
    output: str | list[InputText | InputImage]
    id: str | None = None
    status: str | None = None


Item = InputMessage | FunctionCall | FunctionCallOutput


class FunctionTool(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function", forbid_unknown_fields=True
):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ChosenFunction(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function", forbid_unknown_fields=True
):
    name: str


class TextFormat(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text", forbid_unknown_fields=True
): ...


class JsonFormat(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_object", forbid_unknown_fields=True
): ...


class SchemaFormat(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    name: str
    schema: Schema
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    "reasoning": (({}, {"effort": "none"}), "this model does not reason before it answers"),
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
