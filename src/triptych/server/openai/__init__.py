"""OpenAI's API over a session: chat and text completions, streamed or whole."""

from __future__ import annotations

from triptych.server.openai.chat import ChatDialect
from triptych.server.openai.completions import CompletionDialect
from triptych.server.openai.endpoint import Endpoint

__all__ = ["ChatDialect", "CompletionDialect", "Endpoint"]
