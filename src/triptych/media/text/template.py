"""A checkpoint's chat template, in jinja2's sandbox, with Hugging Face's options.

A template is a program that came with the weights. It sees plain JSON values only, cannot reach Python, and its
output, its time (looked at wherever it calls, reads an attribute or writes) and its products are bounded.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from triptych.errors import CheckpointError, RequestError
from triptych.media.text import tools
from triptych.media.text.tools import CallSyntax

Content = str | list[dict[str, str]]  # of a message, as the template wants it

MAX_SECONDS = 5.0
MAX_CHARACTERS = 16_000_000

_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


class ChatTemplate:
    """One compiled template.

    wants_lists: how it reads a message's content. has_system: whether it shows a system message. syntax: how it
    writes calls of tools, None where it has no place for tools.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: names such as `bos_token` and their texts. Raises CheckpointError."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self.wants_lists = self._is_fond_of_lists()
        self.has_system = self._shows_system()
        self.syntax = self._call_syntax()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises RequestError where the template refuses, fails or does not come to an end."""
        arguments = arguments or {}
        if taken := arguments.keys() & {"messages", "add_generation_prompt", "tools", *self._special_tokens}:
            names = ", ".join(sorted(taken))
            raise RequestError(f"template arguments may not set {names}", param="chat_template_kwargs")
        variables = {"tools": tools, "documents": None, **self._special_tokens, **arguments}
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            return self._write(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except RequestError:
            raise
        except Exception as error:  # a template fails as any program does
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error
        finally:
            _deadline.reset(token)

    def _write(self, **variables: Any) -> str:
        pieces, num_characters = [], 0
        for piece in self._template.generate(variables):
            _check_time()
            num_characters += len(piece)
            if num_characters > MAX_CHARACTERS:
                raise SecurityError(f"it wrote more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _is_fond_of_lists(self) -> bool:
        """Ask it: a template that reads lists writes their text bare, one that does not writes Python's form of them.

        vLLM reads the syntax tree for this; the answers differ only for templates that take both.
        """
        probe = "triptych-probe"
        try:
            parts = [{"type": "text", "text": probe}]
            said = self.render([{"role": "user", "content": parts}])
        except RequestError:
            return False
        return probe in said and "'type'" not in said and '"type"' not in said

    def _shows_system(self) -> bool:
        probe = "triptych-probe"
        texts = {"system": probe, "user": "?"}
        return probe in self._try([{"role": role, "content": self._content(text)} for role, text in texts.items()])

    def _call_syntax(self) -> CallSyntax | None:
        messages = [message | {"content": self._content(message["content"])} for message in tools.probe()]
        messages[-1] = tools.probe()[-1]  # a result is a string to every template that knows of results
        return tools.syntax_in(self._try(messages, tools.for_template([tools.PROBE])))

    def _content(self, text: str) -> Content:
        return [{"type": "text", "text": text}] if self.wants_lists else text

    def _try(self, messages: Sequence[Mapping[str, Any]], offered: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The prompt, or nothing where the template refuses."""
        try:
            return self.render(messages, tools=offered)
        except RequestError:
            return ""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Looks at the clock, and refuses products that would fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return super().call(context, obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_time()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > 1000:
            raise SecurityError(f"it would raise {left} to the power of {right}")
        sequence, number = (left, right) if hasattr(left, "__len__") else (right, left)
        if hasattr(sequence, "__len__") and isinstance(number, int) and len(sequence) * number > MAX_CHARACTERS:
            raise SecurityError(f"it would repeat {len(sequence):,} items {number:,} times")
        return super().call_binop(context, operator, left, right)


class _Namespace(Namespace):
    """Jinja's, without underscored names, as Hugging Face has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may call one of its names `self`
        named = dict(*args[1:], **kwargs)
        for name in named:
            _check_name(name)
        Namespace.__init__(args[0], named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: Hugging Face's mark for training; only its body counts here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> Any:
        return caller()


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise SecurityError(f"it ran for more than {MAX_SECONDS} s")


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
