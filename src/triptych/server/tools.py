"""Tools on offer and how they may be used, in whatever words a dialect says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.chat import Form, Tool
from triptych.errors import RequestError

MAX_TOOLS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """tools: those shown to the model. only: the one it must call; is_needed: it must call some."""

    tools: tuple[Tool, ...] = ()
    only: str | None = None
    is_needed: bool = False
    is_single: bool = False  # one call at most

    def form(self, asked: Form | None, *, param: str) -> Form | None:
        """The form of an answer that may call tools, or else has the form `asked`. Raises RequestError for both."""
        if not self.tools:
            return asked
        if asked is not None:
            raise RequestError(
                f"`{param}` and `tools` ask for two forms of one answer",
                hint="leave the tools out, or set `tool_choice` to none, where the answer must have a format",
                param=param,
            )
        names = tuple(tool.name for tool in self.tools) if self.only is None else (self.only,)
        return Form(
            kind="tools", value=names, is_needed=self.is_needed or self.only is not None, is_single=self.is_single
        )


def offer(tools: Sequence[Tool], *, choice: str, only: str | None = None, is_single: bool = False) -> Offer:
    """choice: none, auto, required, or one `only`. Raises RequestError for what cannot be called."""
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools are called `{twice[:64]}`", hint="give each its own name", param="tools")
    if choice == "none":
        return Offer()
    if only is not None and only not in names:
        raise RequestError(
            f"`tool_choice` names `{only[:64]}`, which is none of {len(names)} tools",
            hint="add it to `tools`",
            param="tool_choice",
        )
    if choice == "required" and not names:
        raise RequestError("`tool_choice` needs a tool, and there is none", hint="send `tools`", param="tool_choice")
    return Offer(tools=tuple(tools), only=only, is_needed=choice == "required", is_single=is_single)
