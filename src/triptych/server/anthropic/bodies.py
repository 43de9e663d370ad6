"""What a caller of `/v1/messages` may send: one record for each kind of block."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triptych.server.body import Exact, Fields, Refused
from triptych.server.openai.bodies import MAX_STOPS, MAX_TOOLS, FunctionBody, Positive, Probability, Schema, Seed, Stop

BLOCK_KINDS = ("text", "image", "tool_use", "tool_result")


class Base64Source(Exact, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    media_type: str  # not trusted: the picture's own bytes say what it is
    data: str


class UrlSource(Exact, frozen=True, kw_only=True, tag_field="type", tag="url"):
    url: str


class TextBlock(Exact, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: dict[str, Any] | None = None  # every prefix is cached as it is
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ImageBlock(Exact, frozen=True, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource
    cache_control: dict[str, Any] | None = None


class ToolUseBlock(Exact, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: dict[str, Any] | None = None


class ToolResultBlock(Exact, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock


class MessageIn(Exact, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(min_length=1)]


class ToolIn(FunctionBody, frozen=True, kw_only=True):
    parameters: Schema = msgspec.field(name="input_schema")
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come


class ToolChoiceIn(Exact, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class SchemaFormat(Exact, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    schema: Schema


class OutputConfig(Exact, frozen=True, kw_only=True):
    format: SchemaFormat | None = None
    effort: Literal["high"] | None = None  # the API's default; this model knows no other


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, as `/v1/messages/count_tokens` takes it."""

    model: str | None = None
    messages: Annotated[list[MessageIn], Meta(min_length=1, max_length=4096)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolIn], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceIn | None = None
    output_config: OutputConfig | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # vLLM's: how pictures are shown
    triptych: dict[str, Any] | None = None  # ours: the fields of `Compression`


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """The same, and how it is to be answered."""

    max_tokens: Positive
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Probability | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: Seed | None = None  # ours, as the next
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None


_ONE_TIER = "there is one tier; `priority` orders requests within it"
_NO_THOUGHT = "this model does not think before it answers"

COUNT_REFUSED: Refused = {
    "thinking": (({"type": "disabled"}, {"type": "adaptive"}), _NO_THOUGHT),
    "speed": (("standard",), _ONE_TIER),
    "mcp_servers": (([],), "no servers are called from here"),
    "context_management": (({},), "a conversation is never cut in silence; shorten it yourself"),
}
MESSAGES_REFUSED: Refused = {
    **COUNT_REFUSED,
    "service_tier": (("auto", "standard_only"), _ONE_TIER),
    "container": ((), "no code is run here"),
    "diagnostics": ((), "the cache explains nothing; `usage` says what it gave"),
    "inference_geo": ((), "answers are made where this server stands"),
}

COUNT = Fields(record=CountBody, ignored=frozenset({"cache_control", "user_profile_id"}), refused=COUNT_REFUSED)
MESSAGES = Fields(
    record=MessagesBody, ignored=frozenset({"cache_control", "user_profile_id", "metadata"}), refused=MESSAGES_REFUSED
)
