"""Chat completions: messages in, assistant messages or chunks of them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triptych.core.chat import Chat, ImagePart, Message, Part, TextPart
from triptych.errors import RequestError
from triptych.server.ask import Ask, wants_usage
from triptych.server.body import compression, convert, freed
from triptych.server.dialect import Choice, Reply
from triptych.server.openai import answers, fields
from triptych.server.openai.answers import Answer, ChatDelta, ChatMessageAnswer, ChoiceAnswer, ChoiceChunk
from triptych.server.openai.bodies import ChatBody, ChatMessage, ImageContent, TextContent
from triptych.server.openai.chunks import ChunkWriter
from triptych.session import TextDelta

MAX_PARTS = 16_384  # of all messages together
OTHER_MODALITY = {
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
}


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """How `/v1/chat/completions` reads a body and writes answers."""

    prefix = "chatcmpl-"

    def read(self, content: dict[str, Any]) -> Ask:
        _check_parts(content.get("messages"))
        body = convert(_served_messages(content), fields.CHAT)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("`top_logprobs` needs `logprobs: true`", param="top_logprobs", hint="set `logprobs`")
        return Ask(
            body=body,
            prompts=(_chat(body),),
            max_tokens=_max_tokens(body),
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_choices=body.n or 1,
            wants_usage=wants_usage(body),
            compression=compression(body.triptych),
        )

    def whole(self, reply: Reply) -> Answer:
        answer = answers.envelope(reply, "chat.completion")
        answer.usage = answers.bill(reply.usage())
        answer.choices = [
            ChoiceAnswer(
                index=index,
                message=ChatMessageAnswer(content=choice.text),
                logprobs=None if reply.ask.num_logprobs is None else answers.chat_logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
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
        if delta.finish is not None:
            ending = ChoiceChunk(
                index=index,
                delta=ChatDelta(),
                finish_reason=delta.finish.value,
                stop_reason=delta.stop_reason,
                triptych=answers.trace(delta.usage, delta.timing),
            )
            pieces.append(ending)
        return pieces


def _served_messages(content: dict[str, Any]) -> dict[str, Any]:
    """The body, its messages freed of fields that ask for nothing. Raises RequestError for the others."""
    messages = content.get("messages")
    if not isinstance(messages, list):
        return content
    kept = []
    for at, message in enumerate(messages):
        if isinstance(message, dict):
            if message.get("role") in ("tool", "function"):
                where = f"messages[{at}].role"
                hint = "send the tool's result as a user message"
                raise RequestError(f"`{where}` is {message['role']!r}: not served", param=where, hint=hint)
            message = freed(message, fields.MESSAGE, where=f"messages[{at}].")
        kept.append(message)
    return {**content, "messages": kept}


def _check_parts(messages: object) -> None:
    """Name the modality of a part that is not served, which a type error would not."""
    num_parts = 0
    for at, message in enumerate(messages if isinstance(messages, list) else []):
        parts = message.get("content") if isinstance(message, dict) else None
        num_parts += len(parts) if isinstance(parts, list) else 0
        if num_parts > MAX_PARTS:
            hint = "join texts that follow one another"
            raise RequestError(f"there are more than {MAX_PARTS:,} parts of content", hint=hint, param="messages")
        for place, part in enumerate(parts if isinstance(parts, list) else []):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("text", "image_url") or not isinstance(kind, str):
                continue
            where = f"messages[{at}].content[{place}].type"
            if kind in OTHER_MODALITY:
                message_text = f"`{where}` is `{kind}`: this model takes text and images, no {OTHER_MODALITY[kind]}"
            else:
                message_text = f"`{where}` is `{kind[:40]}`, which is not a kind of content"
            raise RequestError(message_text, hint="send parts of type `text` or `image_url`", param=where)


def _chat(body: ChatBody) -> Chat:
    return Chat(
        messages=tuple(_message(message, at) for at, message in enumerate(body.messages)),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_args=body.chat_template_kwargs or {},
    )


def _message(message: ChatMessage, at: int) -> Message:
    if message.content is None or message.content == []:
        where = f"messages[{at}].content"
        raise RequestError(f"`{where}` is missing or empty", hint="send a text or a list of parts", param=where)
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return Message(role=role, parts=(TextPart(text=message.content),))
    return Message(role=role, parts=tuple(_part(part) for part in message.content))


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
