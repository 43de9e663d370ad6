"""Tools on offer and the form asked for: as callers spell them, and as `core/chat` has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from triptych.core.chat import Form, Tool
from triptych.errors import RequestError
from triptych.server.openai.bodies import (
    AllowedTools,
    ChoicesBody,
    FunctionBody,
    JsonFormat,
    NamedTool,
    ResponseFormat,
    Schema,
    SchemaFormat,
    StructuredOutputs,
    ToolChoice,
)


def tools(functions: Iterable[FunctionBody]) -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=one.name,
            description=one.description or "",
            parameters=one.parameters or {},
            is_strict=bool(one.strict),
        )
        for one in functions
    )


def with_tools(
    offered: tuple[Tool, ...], choice: ToolChoice | None, *, is_single: bool, otherwise: Form | None
) -> tuple[tuple[Tool, ...], Form | None]:
    """The tools that the model is shown, and the form of its answer. Raises RequestError.

    otherwise: the form of an answer that calls none.
    """
    names = [tool.name for tool in offered]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"two tools are named {twice!r}", hint="give each its own name", param="tools")
    if choice == "none" or (not offered and choice in (None, "auto")):
        return (), otherwise
    chosen = _names(choice)
    unknown = sorted(set(chosen or ()) - set(names))
    if unknown or not offered:
        wanted = f"names {unknown[0][:100]!r}, which is" if unknown else f"is {choice!r}, but there is"
        raise RequestError(f"`tool_choice` {wanted} none of the {len(offered)} `tools`", param="tool_choice")
    is_needed = choice == "required" or isinstance(choice, NamedTool) or _mode(choice) == "required"
    return offered, Form(
        kind="tools",
        value=chosen,
        is_needed=is_needed,
        is_single=is_single or isinstance(choice, NamedTool),
        otherwise=None if is_needed else otherwise,
    )


def _names(choice: ToolChoice | None) -> tuple[str, ...] | None:
    """The tools that may be called; None for all."""
    if isinstance(choice, NamedTool):
        return (choice.function.name,)
    if isinstance(choice, AllowedTools):
        return tuple(tool.function.name for tool in choice.allowed_tools.tools)
    return None


def _mode(choice: ToolChoice | None) -> str:
    return choice.allowed_tools.mode if isinstance(choice, AllowedTools) else "auto"


def asked(body: ChoicesBody) -> Form | None:
    """The form that a body asks for, None where any text will do. Raises RequestError where it asks for several."""
    forms = {
        "response_format": of_format(body.response_format),
        "structured_outputs": None if body.structured_outputs is None else _of_outputs(body.structured_outputs),
        "guided_json": _of_schema(body.guided_json, "guided_json"),
        "guided_regex": _of(body.guided_regex, "regex"),
        "guided_choice": _of(body.guided_choice, "choice"),
        "guided_grammar": _of(body.guided_grammar, "grammar"),
    }
    return _only_one(forms)


def _only_one(forms: dict[str, Form | None]) -> Form | None:
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        names = " and ".join(f"`{name}`" for name in given)
        raise RequestError(f"{names} each ask for a form", hint="send one of them", param=list(given)[1])
    return next(iter(given.values()), None)


def of_format(asked: ResponseFormat | None) -> Form | None:
    if isinstance(asked, SchemaFormat):
        return Form(kind="schema", value=asked.json_schema.schema, is_strict=bool(asked.json_schema.strict))
    if isinstance(asked, JsonFormat):
        return Form(kind="json") if asked.schema is None else Form(kind="schema", value=asked.schema, is_strict=False)
    return None


def _of_outputs(asked: StructuredOutputs) -> Form:
    forms = {
        "structured_outputs.json": _of_schema(asked.json, "structured_outputs.json"),
        "structured_outputs.json_object": Form(kind="json") if asked.json_object else None,
        "structured_outputs.regex": _of(asked.regex, "regex"),
        "structured_outputs.choice": _of(asked.choice, "choice"),
        "structured_outputs.grammar": _of(asked.grammar, "grammar"),
    }
    form = _only_one(forms)
    if form is None:
        hint = "one of " + ", ".join(f"`{name}`" for name in StructuredOutputs.__struct_fields__)
        raise RequestError("`structured_outputs` asks for nothing", hint=hint, param="structured_outputs")
    return form


def _of(value: Any, kind: Literal["regex", "choice", "grammar"]) -> Form | None:
    return None if value is None else Form(kind=kind, value=value)


def _of_schema(value: str | Schema | None, param: str) -> Form | None:
    """A schema, or one as JSON text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=Schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"`{param}` is not a JSON schema: {str(error)[:200]}", param=param) from None
    return None if value is None else Form(kind="schema", value=value)
