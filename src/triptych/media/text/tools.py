"""Tools in a prompt, and how a model writes that it calls one: in its template's syntax, or in ours."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from triptych.core.chat import Chat, Message, Part, TextPart, Tool, ToolCall

ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """A call is `sign` `begin` NAME `middle` ARGUMENTS `end`; `joint` stands for sign and begin of a further one.

    Once a model has written the sign, all that follows is held to the tools on offer.
    """

    sign: str
    begin: str
    middle: str
    end: str
    joint: str | None = None  # None: one call an answer
    close: str = ""  # behind the last call
    is_first: bool = False  # a call stands at the answer's beginning, or is none
    id_characters: int | None = None  # what a template demands of a call's id; None: anything

    @property
    def words(self) -> str:
        """All that the syntax itself may write."""
        return "".join([self.sign, self.begin, self.middle, self.end, self.joint or "", self.close])

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model writes them."""
        texts = [f"{call.name}{self.middle}{call.arguments}{self.end}" for call in calls]
        return f"{self.sign}{self.begin}{(self.joint or '').join(texts)}{self.close}"

    def new_id(self) -> str:
        if self.id_characters is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ALPHABET) for _ in range(self.id_characters))

    def fitting(self, id: str) -> str:
        """An id that the template takes: the same for the same, for callers bring ids of other models."""
        if self.id_characters is None or re.fullmatch(f"[A-Za-z0-9]{{{self.id_characters}}}", id):
            return id
        return hashlib.sha256(id.encode()).hexdigest()[: self.id_characters]


_LIST = CallSyntax(
    sign="[TOOL_CALLS]",
    begin='[{"name": "',
    middle='", "arguments": ',
    end="}",
    joint=', {"name": "',
    close="]",
    id_characters=9,
)

# NousResearch's Hermes, and with it Qwen 2.5 and 3, SmolLM 3 and many more.
HERMES = CallSyntax(
    sign="<tool_call>",
    begin='\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    joint='\n<tool_call>\n{"name": "',
)
# Llama 3.1 and later; its template refuses a message of several calls.
LLAMA = CallSyntax(sign='{"name": "', begin="", middle='", "parameters": ', end="}", is_first=True)
# Mistral 7B v0.3; Nemo, which leaves a blank out; Ministral 3 and Devstral.
_ARGS = replace(_LIST, begin="", middle="[ARGS]", end="", joint="[TOOL_CALLS]", close="")
SYNTAXES = (HERMES, replace(_LIST, begin=' [{"name": "'), _LIST, _ARGS, LLAMA)

PROBE = Tool(name="triptych_probe", description="triptych-described", parameters={"type": "object", "properties": {}})
PROBE_RESULT = "triptych-result"


def probe() -> list[dict[str, Any]]:
    """A conversation whose rendering tells what a template makes of calls: see `syntax_in`."""
    function = {"name": PROBE.name, "arguments": {"triptych": 1}}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a" * 9, "type": "function", "function": function}]},
        {"role": "tool", "content": PROBE_RESULT, "tool_call_id": "a" * 9, "name": PROBE.name},
    ]


def syntax_in(rendered: str) -> CallSyntax | None:
    """How a template wrote the probe's call; None where it has no place for a tool, its call or its result."""
    if PROBE.description not in rendered or PROBE_RESULT not in rendered:
        return None
    call = {syntax: f'{syntax.sign}{syntax.begin}{PROBE.name}{syntax.middle}{{"triptych": 1}}' for syntax in SYNTAXES}
    return next((syntax for syntax in SYNTAXES if call[syntax] in rendered), None)


def for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates know them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def calls_for_template(calls: Sequence[ToolCall], syntax: CallSyntax) -> list[dict[str, Any]]:
    """Calls as templates know them: their arguments an object, where they are one."""
    return [
        {
            "id": syntax.fitting(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": _object(call.arguments)},
        }
        for call in calls
    ]


def _object(arguments: str) -> Any:
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


# ── for a template that has no place for tools ─────────────────────────────────────────────────────────────────


def spelled_out(chat: Chat, *, has_system: bool) -> Chat:
    """The same conversation in plain messages: tools in the system message, calls and results as Hermes has them.

    has_system: whether the template shows system messages; if not, the first message tells of the tools.
    """
    messages: list[Message] = []
    for message in chat.messages:
        if message.role == "tool":
            told = Message(role="user", parts=_response(message.parts))
            if messages and messages[-1].role == "user" and messages[-1].tool_call_id is not None:
                before = messages.pop()
                told = Message(role="user", parts=_joined(*before.parts, TextPart(text="\n"), *told.parts))
            messages.append(replace(told, tool_call_id=message.tool_call_id or ""))
        elif message.tool_calls:
            messages.append(Message(role=message.role, parts=_with_calls(message)))
        else:
            messages.append(message)
    return replace(chat, messages=tuple(_with_tools(messages, chat.tools, has_system)), tools=())


def _with_tools(messages: list[Message], tools: Sequence[Tool], has_system: bool) -> list[Message]:
    if not tools:
        return messages
    text = TextPart(text=_description(tools))
    first = messages[0] if messages else None
    if first is not None and first.role in ("system", "developer"):
        return [replace(first, parts=_joined(*first.parts, TextPart(text="\n\n"), text)), *messages[1:]]
    if has_system or first is None or first.role != "user":
        return [Message(role="system", parts=(text,)), *messages]
    return [replace(first, parts=_joined(text, TextPart(text="\n\n"), *first.parts)), *messages[1:]]


def _description(tools: Sequence[Tool]) -> str:
    """What Hermes's and Qwen's templates tell a model of its tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in for_template(tools))
    example = HERMES.write([ToolCall(id="", name="NAME", arguments="{…}")])
    return (
        "You may call one or more of these functions to help the user. Each is described by a JSON schema:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call a function, answer with its name and arguments as JSON between tags:\n{example}"
    )


def _with_calls(message: Message) -> tuple[Part, ...]:
    calls = [replace(call, arguments=call.arguments or "{}") for call in message.tool_calls]
    text = TextPart(text=HERMES.write(calls))
    return _joined(*message.parts, TextPart(text="\n"), text) if message.parts else (text,)


def _response(parts: Sequence[Part]) -> tuple[Part, ...]:
    return _joined(TextPart(text="<tool_response>\n"), *parts, TextPart(text="\n</tool_response>"))


def _joined(*parts: Part) -> tuple[Part, ...]:
    """Texts that follow one another as one: there are templates that show a message's first text alone."""
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(part, TextPart) and isinstance(joined[-1], TextPart):
            joined[-1] = TextPart(text=joined[-1].text + part.text)
        else:
            joined.append(part)
    return tuple(joined)
