"""How `/v1/responses` reads a body; what it answers is in the files beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from triptych.core.chat import Chat, Form, ImagePart, Message, Part, TextPart, ToolCall
from triptych.errors import RequestError
from triptych.server.ask import Ask
from triptych.server.body import compression, convert
from triptych.server.content import check_kinds
from triptych.server.dialect import Reply
from triptych.server.openai.answers import chat_logprobs
from triptych.server.openai.bodies import FunctionName, NamedTool, ToolChoice
from triptych.server.openai.form import of_format, tools, with_tools
from triptych.server.responses import answers
from triptych.server.responses.bodies import (
    ITEM_KINDS,
    PART_KINDS,
    RESPONSES,
    ChosenFunction,
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    InputMessage,
    InputText,
    OutputText,
    ResponsesBody,
    SchemaFormat,
)  # fmt: skip
from triptych.server.responses.writer import ResponsesWriter

LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """Stateless: a conversation comes whole each time, and nothing of it stays."""

    prefix = "resp_"
    prompt_field = "input"

    def read(self, content: dict[str, Any]) -> Ask:
        check_kinds([("tools", content.get("tools"))], ("function",))
        body = convert({**content, "input": _typed(content.get("input"))}, RESPONSES)
        shown, form = with_tools(
            tools(body.tools or ()), _choice(body), is_single=body.parallel_tool_calls is False, otherwise=_form(body)
        )
        wants_logprobs = LOGPROBS in (body.include or ())
        if body.top_logprobs is not None and not wants_logprobs:
            raise RequestError(
                f'`top_logprobs` needs `include: ["{LOGPROBS}"]`', hint="set `include`", param="top_logprobs"
            )
        return Ask(
            body=body,
            said=structs.replace(body, input=""),
            prompts=(Chat(messages=tuple(_messages(body)), tools=shown, shown=body.mm_processor_kwargs or {}),),
            max_tokens=body.max_output_tokens,
            is_ceiling=True,
            num_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
            form=form,
            compression=compression(body.triptych),
        )

    def whole(self, reply: Reply) -> answers.ResponseAnswer:
        return answers.ended(reply, chat_logprobs(reply.choices[0].logprobs).content)

    def writer(self, reply: Reply) -> ResponsesWriter:
        return ResponsesWriter(reply)


def _typed(given: object) -> object:
    """The input; an item with a role and no type is a message. Raises RequestError for kinds that are not served."""
    if not isinstance(given, list):
        return given
    items = [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item and "type" not in item else item
        for item in given
    ]
    check_kinds([("input", items)], ITEM_KINDS)
    check_kinds(_contents(items), PART_KINDS)
    return items


def _contents(items: Sequence[object]) -> Iterator[tuple[str, object]]:
    for at, item in enumerate(items):
        if isinstance(item, dict):
            yield f"input[{at}].content", item.get("content")
            yield f"input[{at}].output", item.get("output")


def _messages(body: ResponsesBody) -> Iterator[Message]:
    """The conversation. An assistant's text and the calls that follow it are one message, as templates have it."""
    if body.instructions:
        yield Message(role="system", parts=(TextPart(text=body.instructions),))
    if isinstance(body.input, str):
        yield Message(role="user", parts=(TextPart(text=body.input),))
        return
    said: Message | None = None  # by the assistant, and not yet known to be all
    for item in body.input:
        if isinstance(item, FunctionCall):
            said = said or Message(role="assistant")
            said = replace(said, tool_calls=(*said.tool_calls, _call(item)))
            continue
        if said is not None:
            yield said
        message = _message(item)
        said = message if message.role == "assistant" else None
        if said is None:
            yield message
    if said is not None:
        yield said


def _message(item: InputMessage | FunctionCallOutput) -> Message:
    if isinstance(item, FunctionCallOutput):
        return Message(role="tool", parts=_parts(item.output), tool_call_id=item.call_id)
    return Message(role="system" if item.role == "developer" else item.role, parts=_parts(item.content))


def _call(item: FunctionCall) -> ToolCall:
    return ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)


def _parts(content: str | Sequence[InputText | InputImage | OutputText]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(text=content),)
    return tuple(_image(one) if isinstance(one, InputImage) else TextPart(text=one.text) for one in content)


def _image(part: InputImage) -> ImagePart:
    detail = part.detail or "auto"
    return ImagePart(source=part.image_url, detail="high" if detail == "original" else detail)


def _choice(body: ResponsesBody) -> ToolChoice | None:
    choice = body.tool_choice
    return NamedTool(function=FunctionName(name=choice.name)) if isinstance(choice, ChosenFunction) else choice


def _form(body: ResponsesBody) -> Form | None:
    format = None if body.text is None else body.text.format
    if isinstance(format, SchemaFormat):
        return Form(kind="schema", value=format.schema, is_strict=bool(format.strict))
    return of_format(format)
