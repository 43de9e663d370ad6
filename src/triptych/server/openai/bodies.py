"""What a caller may send: one record a body, with exact types and ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triptych.server.body import Exact

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_CHOICES = 128  # of one prompt; the server's own limit counts them over all prompts
MAX_LOGPROBS = 20
MAX_TOOLS = 128  # OpenAI's
MAX_IDS = 1 << 20  # of a prompt: more than any context, few enough to be looked at in a moment

Natural = Annotated[int, Meta(ge=0)]
Ids = Annotated[list[Natural], Meta(max_length=MAX_IDS)]
Positive = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
Schema = dict[str, Any]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(Exact, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: the bill so far, in every chunk
    include_obfuscation: Literal[False] | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """How all dialects ask for an answer. `None` means that the caller did not say."""

    model: str | None = None
    min_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # 0 and -1: all
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[Natural, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] | None = (
        None
    )
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Natural], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=86_400.0)] | None = None  # seconds, from the request's arrival
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    triptych: dict[str, Any] | None = None  # ours: the fields of `Compression`


class FunctionBody(Exact, frozen=True, kw_only=True):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ToolBody(Exact, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionBody


class FunctionName(Exact, frozen=True, kw_only=True):
    name: str


class NamedTool(Exact, frozen=True, kw_only=True, tag_field="type", tag="function"):
    function: FunctionName


class ToolReference(Exact, frozen=True, kw_only=True):
    type: Literal["function"]
    function: FunctionName


class ToolSubset(Exact, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Exact, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: ToolSubset


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class TextFormat(Exact, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Anything."""


class JsonFormat(Exact, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """A JSON object. schema: llama.cpp's way to ask for more."""

    schema: Schema | None = None


class NamedSchema(Exact, frozen=True, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Schema | bool
    strict: bool | None = None


class SchemaFormat(Exact, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonFormat | SchemaFormat


class StructuredOutputs(Exact, frozen=True, kw_only=True):
    """vLLM's: one of these."""

    json: str | Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class ChoicesBody(Body, frozen=True, kw_only=True):
    """What chat and text completions have in common besides; `guided_*` are vLLM's former names."""

    max_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None


class ImageUrl(Exact, frozen=True, kw_only=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class TextContent(Exact, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ImageContent(Exact, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str
    uuid: str | None = None  # vLLM's name for a picture; ours are known by their content


class CalledFunction(Exact, frozen=True, kw_only=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class CallBody(Exact, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of the stream it was put together from


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContent | ImageContent] | None = None
    tool_calls: Annotated[list[CallBody], Meta(max_length=1024)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(ChoicesBody, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionBody(ChoicesBody, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | Ids | Natural], Meta(max_length=MAX_IDS)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
