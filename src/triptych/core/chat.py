"""What a user says: messages of text and media, tools on offer, the form an answer must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """A picture: its bytes, or a URL (`data:`, `http(s):` or `file:`) that `media/fetch` resolves."""

    source: bytes | str
    detail: Literal["auto", "low", "high"] = "auto"


Part = TextPart | ImagePart


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may ask its caller to run. parameters: a JSON schema of one object.

    is_strict: a schema that cannot be held in full is refused; else what cannot be held is left to the model.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """What the model asked for. arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """tool_calls: of an assistant. tool_call_id: of a `tool` message, which call it answers; name: the tool's."""

    role: str
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be continued. `template_args` go to the chat template as they are.

    shown: changes to how its pictures are prepared (`media/image/adapt`).
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_args: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form that an answer must have: what the decoder may say next is held to it, token by token.

    json: any JSON object. schema: a JSON schema. regex, grammar: a regular expression, llguidance's Lark. choice:
    one of some texts. tools: a call of a tool; `value` names those that may be called (None: all on offer).
    """

    kind: Literal["json", "schema", "regex", "grammar", "choice", "tools"]
    value: Any = None
    is_strict: bool = True  # of schema: as `Tool`'s
    is_needed: bool = True  # of tools: there is no other way; else free text, or what `otherwise` asks for
    is_single: bool = False  # of tools: one call at most
    otherwise: Form | None = None
