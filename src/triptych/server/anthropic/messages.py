"""How `/v1/messages` reads a body; what it answers is in the files beside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from triptych.core.chat import Chat, Form, ImagePart, Message, Part, TextPart, Tool, ToolCall
from triptych.errors import RequestError
from triptych.server.anthropic import answers
from triptych.server.anthropic.bodies import (
    BLOCK_KINDS,
    COUNT,
    MESSAGES,
    CountBody,
    ImageBlock,
    MessageIn,
    TextBlock,
    ToolChoiceIn,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)  # fmt: skip
from triptych.server.anthropic.writer import MessagesWriter
from triptych.server.ask import Ask
from triptych.server.body import compression, convert
from triptych.server.content import check_kinds
from triptych.server.dialect import Reply
from triptych.server.openai.bodies import Body, FunctionName, NamedTool, ToolChoice
from triptych.server.openai.form import tools, with_tools

SAME = ("model", "temperature", "top_k", "top_p", "seed", "stream", "priority", "cache_salt")  # in both dialects


@dataclass(frozen=True, slots=True)
class MessagesDialect:
    """Anthropic's words for the same questions and answers."""

    prefix = "msg_"
    prompt_field = "messages"

    def read(self, content: dict[str, Any]) -> Ask:
        _check(content)
        body = convert(content, MESSAGES)
        shown, form = _offer(body)
        return Ask(
            body=Body(stop=body.stop_sequences, **{name: getattr(body, name) for name in SAME}),
            prompts=(_chat(body, shown),),
            max_tokens=body.max_tokens,
            is_ceiling=True,
            num_logprobs=None,
            form=form,
            compression=compression(body.triptych),
        )

    def whole(self, reply: Reply) -> answers.MessageAnswer:
        return answers.ended(reply)

    def writer(self, reply: Reply) -> MessagesWriter:
        return MessagesWriter(reply)


def read_count(content: dict[str, Any]) -> Ask:
    """A conversation whose tokens are to be counted. Raises RequestError."""
    _check(content)
    body = convert(content, COUNT)
    shown, _ = _offer(body)
    return Ask(
        body=Body(model=body.model),
        prompts=(_chat(body, shown),),
        max_tokens=None,
        num_logprobs=None,
        compression=compression(body.triptych),
    )


def _check(content: Mapping[str, Any]) -> None:
    """Raises RequestError for kinds of blocks and tools that are not served."""
    messages, tools = content.get("messages"), content.get("tools")
    check_kinds(_contents(messages if isinstance(messages, list) else []), BLOCK_KINDS)
    check_kinds([("tools", tools)], ("custom",))
    check_kinds([("system", content.get("system"))], ("text",))


def _contents(messages: Sequence[object]) -> Iterator[tuple[str, object]]:
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        yield f"messages[{at}].content", content
        for place, block in enumerate(content if isinstance(content, list) else []):
            if isinstance(block, dict):
                yield f"messages[{at}].content[{place}].content", block.get("content")


def _chat(body: CountBody, shown: tuple[Tool, ...]) -> Chat:
    messages = [one for at, message in enumerate(body.messages) for one in _messages(message, at)]
    if messages and messages[-1].role == "assistant":
        raise RequestError(
            "the last message is the assistant's own: an answer that was begun is not continued",
            hint="end with a user message; to have a text continued, use /v1/completions",
            param="messages",
        )
    if body.system:
        messages.insert(0, Message(role="system", parts=_parts(body.system)))
    return Chat(messages=tuple(messages), tools=shown, shown=body.mm_processor_kwargs or {})


def _messages(message: MessageIn, at: int) -> Iterator[Message]:
    """A message; each result of a tool in it is one of its own, in its place."""
    if isinstance(message.content, str):
        yield Message(role=message.role, parts=_parts(message.content))
        return
    plain: list[TextBlock | ImageBlock] = []
    calls: list[ToolCall] = []
    for place, block in enumerate(message.content):
        where = f"messages[{at}].content[{place}].type"
        if isinstance(block, ToolResultBlock):
            _check_role(message, "user", where)
            if plain:
                yield Message(role=message.role, parts=_parts(plain))
                plain = []
            yield Message(role="tool", parts=_result(block), tool_call_id=block.tool_use_id)
        elif isinstance(block, ToolUseBlock):
            _check_role(message, "assistant", where)
            calls.append(_call(block))
        else:
            plain.append(block)
    if plain or calls:
        yield Message(role=message.role, parts=_parts(plain), tool_calls=tuple(calls))


def _check_role(message: MessageIn, role: str, where: str) -> None:
    if message.role != role:
        raise RequestError(
            f"`{where}` stands in a message of the {message.role}", hint=f"send it as the {role}'s", param=where
        )


def _call(block: ToolUseBlock) -> ToolCall:
    return ToolCall(id=block.id, name=block.name, arguments=msgspec.json.encode(block.input).decode())


def _result(block: ToolResultBlock) -> tuple[Part, ...]:
    """What a tool said; that it failed is told to the model in words, for templates have no other place for it."""
    parts = _parts(block.content or "")
    return (TextPart(text="Error: "), *parts) if block.is_error else parts


def _parts(content: str | Sequence[TextBlock | ImageBlock]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(text=content),)
    return tuple(TextPart(text=one.text) if isinstance(one, TextBlock) else _image(one) for one in content)


def _image(block: ImageBlock) -> ImagePart:
    source = block.source
    if isinstance(source, UrlSource):
        return ImagePart(source=source.url)
    return ImagePart(source=f"data:;base64,{source.data}")


def _offer(body: CountBody) -> tuple[tuple[Tool, ...], Form | None]:
    """The tools that the model is shown, and the form of its answer. Raises RequestError."""
    format = None if body.output_config is None else body.output_config.format
    return with_tools(
        tools(body.tools or ()),
        None if body.tool_choice is None else _choice(body.tool_choice),
        is_single=body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use),
        otherwise=None if format is None else Form(kind="schema", value=format.schema),
    )


def _choice(choice: ToolChoiceIn) -> ToolChoice:
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError(
            f"`tool_choice` of type {choice.type} with name {choice.name or 'none'}",
            hint="a name goes with the type `tool`, and only with it",
            param="tool_choice",
        )
    if choice.name is not None:
        return NamedTool(function=FunctionName(name=choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"
