"""What a user says: messages of text and media parts."""

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
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to be continued. `template_args` go to the chat template as they are."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_args: Mapping[str, Any] = field(default_factory=dict)
