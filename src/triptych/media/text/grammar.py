"""Forms as llguidance's grammars: schemas with few blanks, and calls of tools among free text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from triptych.core.chat import Form, Tool
from triptych.media.text.finite import is_finite
from triptych.media.text.rehearsal import rehearse
from triptych.media.text.tokens import Text
from triptych.media.text.tools import CallSyntax

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One blank, or a new line and its indent: a model that is free to write blanks may never come to an end.
BLANKS: JsonCompileOptions = {"whitespace_pattern": r" |\n {0,32}"}
# Arguments as templates write them.
TIGHT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

OPENING = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})

VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords that hold no schemas
LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")  # and references back: no automaton has them


def grammar_of(form: Form, tools: Sequence[Tool], text: Text) -> str:
    """As llguidance reads it. Raises ValueError or RecursionError for what is no grammar.

    tools: those that a form of kind `tools` may name; text: whose answers are to have it.
    """
    if form.kind == "tools":
        return _calls(_eased(form), [_eased_tool(tool) for tool in tools], text)
    return _behind(text.lead, _plain(_eased(form)))


def _plain(form: Form) -> str:
    if form.kind in ("json", "schema"):
        schema = json.dumps(_with_an_end(_schema_of(form)))
        return LLMatcher.grammar_from_json_schema(schema, defaults=BLANKS, overrides={"lenient": not form.is_strict})
    if form.kind == "regex":
        return LLMatcher.grammar_from_regex(form.value)
    if form.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, form.value)))
    return rehearse(form.value)


def _eased(form: Form) -> Form:
    """The same without what no schema of this kind can be held to, unless it is strict."""
    if form.kind == "schema" and not form.is_strict:
        return replace(form, value=_without_odd_patterns(form.value))
    return form if form.otherwise is None else replace(form, otherwise=_eased(form.otherwise))


def _eased_tool(tool: Tool) -> Tool:
    return tool if tool.is_strict else replace(tool, parameters=_without_odd_patterns(tool.parameters))


def _without_odd_patterns(schema: Any) -> Any:
    """A schema without the expressions that look around; llguidance's own lenience leaves out keywords alone."""
    if isinstance(schema, list):
        return [_without_odd_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in VALUES else _without_odd_patterns(value)
        for name, value in schema.items()
        if not (name == "pattern" and isinstance(value, str) and LOOK_AROUND.search(value))
    }


def _behind(lead: str, grammar: str) -> str:
    """A grammar whose texts have a lead before them, which the detokenizer takes away again."""
    return _around(f"start: {_quoted(lead)} @form", grammar) if lead else grammar


def _around(lark: str, grammar: str) -> str:
    """Lark that calls another grammar `@form`."""
    form = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**form, "name": "form"}]})


def _calls(form: Form, tools: Sequence[Tool], text: Text) -> str:
    """Lark: calls of the named tools, or, where none is needed, free text or what `otherwise` asks for."""
    syntax = text.call_syntax
    sign = _literal(syntax.sign, text)
    is_special = sign.startswith("<")
    first = sign if is_special else f"{_quoted(text.lead)} {sign}"
    more = "" if form.is_single or syntax.joint is None else f"({_literal(syntax.joint, text)} call)*"
    calls = f"{_literal(syntax.begin, text)} call {more} {_literal(syntax.close, text)}"
    named = [tool for tool in tools if form.value is None or tool.name in form.value]
    rules = {
        "call": " | ".join(f"call_{index}" for index in range(len(named))),
        **{f"call_{index}": _call(tool, syntax, text) for index, tool in enumerate(named)},
    }
    if form.is_needed:
        rules["start"] = f"{first} {calls}"
    elif form.otherwise is not None and syntax.is_first:
        raise ValueError("this model writes calls as mere JSON, so an answer in a form could not be told from one")
    elif form.otherwise is not None:
        rules["start"] = f"{_quoted(text.lead)} @form | {first} {calls}"
    else:
        rules |= _free(syntax, sign, is_special=is_special) | {"start": f"TEXT | head {calls}"}
    lark = "".join(f"{name}: {rule}\n" for name, rule in rules.items())
    return lark if form.is_needed or form.otherwise is None else _around(lark, _plain(form.otherwise))


def _free(syntax: CallSyntax, sign: str, *, is_special: bool) -> dict[str, str]:
    """Rules for free text, and for what leads from it to a call."""
    if syntax.is_first:
        return {"TEXT": f"/(?s:.*)/ & ~/{re.escape(syntax.sign)}(?s:.*)/", "head": sign}
    return {"TEXT": "/(?s:.*)/", "head" if is_special else "head[lazy]": f"TEXT {sign}"}


def _call(tool: Tool, syntax: CallSyntax, text: Text) -> str:
    """A tool is called with what it declares, unless it says that it takes more."""
    schema = dict(tool.parameters) or {"properties": {}}
    if OPENING.isdisjoint(schema):
        schema["additionalProperties"] = False
    schema.setdefault("type", "object")
    arguments = _inline(schema, is_strict=tool.is_strict)
    return f"{_quoted(tool.name)} {_literal(syntax.middle, text)} {arguments} {_literal(syntax.end, text)}"


def _literal(words: str, text: Text) -> str:
    """Words of a syntax; special tokens among them by their ids."""
    return " ".join(_quoted(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in text.pieces(words))


def _inline(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    return "%json " + json.dumps({**_with_an_end(schema), "x-guidance": {**TIGHT, "lenient": not is_strict}})


def _with_an_end(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if not is_finite(schema):
        raise ValueError("its references demand one another without end; let one of them be left out, or be null")
    return schema


def _schema_of(form: Form) -> dict[str, Any]:
    if form.kind == "json":
        return {"type": "object"}
    return form.value if isinstance(form.value, dict) else {"anyOf": [form.value]}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
