"""Chat completions: messages in, assistant messages or chunks of them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from triptych.core.chat import Chat, ImagePart, Message, Part, TextPart, ToolCall
from triptych.core.request import FinishReason
from triptych.errors import RequestError
from triptych.server.ask import Ask, bills_each, prompt_logprobs, wants_usage
from triptych.server.body import compression, convert, freed
from triptych.server.content import check_kinds
from triptych.server.dialect import Choice, Reply
from triptych.server.openai import answers, fields
from triptych.server.openai import form as forms
from triptych.server.openai.answers import (
    Answer,
    CallAnswer,
    CallChunk,
    ChatDelta,
    ChatMessageAnswer,
    ChoiceAnswer,
    ChoiceChunk,
    FunctionAnswer,
)
from triptych.server.openai.bodies import ChatBody, ChatMessage, ImageContent, TextContent
from triptych.server.openai.chunks import ChunkWriter
from triptych.session import CallDelta, TextDelta

PART_KINDS = ("text", "image_url")


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """How `/v1/chat/completions` reads a body and writes answers."""

    prefix = "chatcmpl-"
    prompt_field = "messages"

    def read(self, content: dict[str, Any]) -> Ask:
        check_kinds(_contents(content.get("messages")), PART_KINDS)
        body = convert(_served_messages(content), fields.CHAT)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("`top_logprobs` needs `logprobs: true`", param="top_logprobs", hint="set `logprobs`")
        shown, form = forms.with_tools(
            forms.tools(tool.function for tool in body.tools or ()),
            body.tool_choice,
            is_single=body.parallel_tool_calls is False,
            otherwise=forms.asked(body),
        )
        return Ask(
            body=body,
            prompts=(replace(_chat(body), tools=shown),),
            form=form,
            max_tokens=_max_tokens(body),
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_prompt_logprobs=prompt_logprobs(body),
            num_choices=body.n or 1,
            wants_usage=wants_usage(body),
            bills_each=bills_each(body),
            compression=compression(body.triptych),
        )

    def whole(self, reply: Reply) -> Answer:
        answer = answers.envelope(reply, "chat.completion")
        answer.usage = answers.bill(reply.usage())
        answer.prompt_logprobs = answers.prompt_logprobs(reply.choices[0].prompt_logprobs)
        answer.choices = [
            ChoiceAnswer(
                index=index,
                message=_answer(choice),
                logprobs=None if reply.ask.num_logprobs is None else answers.chat_logprobs(choice.logprobs),
                finish_reason=_finish(choice),
                stop_reason=choice.stop_reason,
                triptych=answers.trace(choice.usage, choice.timing),
            )
            for index, choice in enumerate(reply.choices)
        ]
        return answer

    def writer(self, reply: Reply) -> ChunkWriter:
        return ChunkWriter(reply, "chat.completion.chunk", self)

    def opening(self, index: int, choice: Choice) -> list[ChoiceChunk]:
        return [ChoiceChunk(index=index, delta=ChatDelta(role="assistant", content=""))]

    def pieces(self, index: int, delta: TextDelta, choice: Choice) -> list[ChoiceChunk]:
        """A finish comes apart from the text, as OpenAI's does."""
        pieces = []
        if delta.text or delta.logprobs:
            logprobs = answers.chat_logprobs(delta.logprobs) if delta.logprobs else None
            pieces.append(ChoiceChunk(index=index, delta=ChatDelta(content=delta.text), logprobs=logprobs))
        for call in delta.calls:
            pieces.append(ChoiceChunk(index=index, delta=ChatDelta(tool_calls=[_call_chunk(call)])))
        if delta.finish is not None:
            ending = ChoiceChunk(
                index=index,
                delta=ChatDelta(),
                finish_reason=_finish(choice),
                stop_reason=delta.stop_reason,
                triptych=answers.trace(delta.usage, delta.timing),
            )
            pieces.append(ending)
        return pieces


def _finish(choice: Choice) -> str:
    """An answer that was cut short says so, even in the midst of a call."""
    return "tool_calls" if choice.calls and choice.finish is FinishReason.STOP else choice.finish_reason


def _answer(choice: Choice) -> ChatMessageAnswer:
    if not choice.calls:
        return ChatMessageAnswer(content=choice.text)
    calls = [
        CallAnswer(id=call.id, function=FunctionAnswer(name=call.name, arguments=call.arguments))
        for call in choice.calls
    ]
    return ChatMessageAnswer(content=choice.text or None, tool_calls=calls)


def _call_chunk(call: CallDelta) -> CallChunk:
    kind = None if call.id is None else "function"
    return CallChunk(
        index=call.index, id=call.id, type=kind, function=FunctionAnswer(name=call.name, arguments=call.arguments)
    )


def _served_messages(content: dict[str, Any]) -> dict[str, Any]:
    """The body, its messages freed of fields that ask for nothing. Raises RequestError for the others."""
    messages = content.get("messages")
    if not isinstance(messages, list):
        return content
    kept = []
    for at, message in enumerate(messages):
        if isinstance(message, dict):
            if message.get("role") == "function":
                where = f"messages[{at}].role"
                hint = "the old name of a tool's result: send the role `tool`, with `tool_call_id`"
                raise RequestError(f"`{where}` is 'function': not served", param=where, hint=hint)
            message = freed(message, fields.MESSAGE, where=f"messages[{at}].")
        kept.append(message)
    return {**content, "messages": kept}


def _contents(messages: object) -> Iterator[tuple[str, object]]:
    for at, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            yield f"messages[{at}].content", message.get("content")


def _chat(body: ChatBody) -> Chat:
    names = {call.id: call.function.name for message in body.messages for call in message.tool_calls or ()}
    return Chat(
        messages=tuple(_message(message, names, f"messages[{at}]") for at, message in enumerate(body.messages)),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_args=body.chat_template_kwargs or {},
        shown=body.mm_processor_kwargs or {},
    )


def _message(message: ChatMessage, names: Mapping[str, str], where: str) -> Message:
    """names: of the functions that were called, by their calls' ids."""
    _check_message(message, where)
    content = message.content or ()
    parts = (TextPart(text=content),) if isinstance(content, str) else tuple(map(_part, content))
    if message.role == "tool":
        id = message.tool_call_id or ""
        return Message(role="tool", parts=parts, tool_call_id=id, name=message.name or names.get(id))
    return Message(
        role="system" if message.role == "developer" else message.role,
        parts=parts,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
    )


def _check_message(message: ChatMessage, where: str) -> None:
    """Raises RequestError for what a message of its role lacks, or has no place for."""
    if message.content in (None, []) and not message.tool_calls:
        raise RequestError(
            f"`{where}.content` is missing or empty", hint="send a text or a list of parts", param=f"{where}.content"
        )
    if message.role == "tool" and message.tool_call_id is None:
        hint = "say which of the calls this is the result of"
        raise RequestError(f"`{where}.tool_call_id` is required", hint=hint, param=f"{where}.tool_call_id")
    misplaced = {
        "tool_calls": message.tool_calls and message.role != "assistant",
        "tool_call_id": message.tool_call_id is not None and message.role != "tool",
        "name": message.name is not None and message.role != "tool",
    }
    for field in (field for field, is_misplaced in misplaced.items() if is_misplaced):
        hint = "write the name into the content" if field == "name" else "see docs/guides/serve.md on tools"
        said = f"`{where}.{field}` has no place in a message of role `{message.role}`"
        raise RequestError(said, hint=hint, param=f"{where}.{field}")


def _part(part: TextContent | ImageContent) -> Part:
    if isinstance(part, TextContent):
        return TextPart(text=part.text)
    if isinstance(part.image_url, str):
        return ImagePart(source=part.image_url)
    return ImagePart(source=part.image_url.url, detail=part.image_url.detail or "auto")


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"`max_tokens` is {old:,} and `max_completion_tokens` is {new:,}",
            hint="send `max_completion_tokens` alone; the other is its old name",
            param="max_tokens",
        )
    return old if new is None else new
