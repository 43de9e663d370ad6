"""Keep what users say from becoming control tokens, whatever a chat template does with it.

A control token's text that the user typed is broken before the template sees it: one character of it gives way to a
private-use stand-in of the same length. It is broken also where only a piece of a control token stands at the edge
of a string, for the template might set the rest beside it. So every control token that is whole in the rendered
prompt is the template's own. Text that needs no breaking reaches the template untouched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triptych.errors import RequestError

_PLANES = ((0x10_0000, 0x10_FFFE), (0xF_0000, 0xF_FFFE))  # Unicode's supplementary private-use areas


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered prompt in which stand-ins break what the user typed; empty where nothing had to be broken."""

    text: str
    stand_ins: Mapping[int, str] = field(default_factory=dict)  # code point → the character it stands for

    @property
    def plain(self) -> str:
        """What the model reads."""
        return self.text.translate(dict(self.stand_ins)) if self.stand_ins else self.text


class Control:
    """The texts that only a template may write."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = frozenset(tokens)
        any_token = _pattern(self.tokens) or r"(?!)"
        self._token = re.compile(any_token)
        self._start = re.compile(f"(?=(?:{any_token}))(.)", re.DOTALL)  # also where two of them overlap
        self._heads = tuple({token[:end] for token in tokens for end in range(1, len(token))})
        self._tails = tuple({token[start:] for token in tokens for start in range(1, len(token))})
        self._alphabet = "".join(sorted(set("".join(tokens))))
        self._joined = "\0".join(self.tokens)

    def find(self, marked: Marked) -> Iterator[re.Match[str]]:
        """The control tokens that the template wrote, leftmost and longest first, as `tokenizers` finds them."""
        return self._token.finditer(marked.text)

    def disarm(self, value: Any) -> tuple[Any, Mapping[int, str]]:
        """A copy of plain JSON data whose strings hold no control token, and the stand-ins it took.

        Keys of nested mappings are broken too, but only where they hold a whole token. Raises RequestError for
        anything that is not JSON.
        """
        try:
            return self._disarm(value)
        except RecursionError:
            raise RequestError("template arguments are nested too deeply", param="chat_template_kwargs") from None

    def _disarm(self, value: Any) -> tuple[Any, Mapping[int, str]]:
        strings = list(_strings(value))
        if not any(self._is_risky(string) for string in strings):
            return value, {}
        base = self._free_range(strings)
        stand_ins = {base + index: character for index, character in enumerate(self._alphabet)}
        table = {character: chr(code) for code, character in stand_ins.items()}
        return self._copy(value, table), stand_ins

    def _is_risky(self, string: str) -> bool:
        return bool(self._token.search(string)) or bool(self._edges(string))

    def _copy(self, value: Any, table: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            return self._break_edges(self._break(value, table), table)
        if isinstance(value, Mapping):
            return {self._break(key, table): self._copy(item, table) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._copy(item, table) for item in value]
        return value

    def _break(self, string: str, table: Mapping[str, str]) -> str:
        return self._start.sub(lambda match: table[match[1]], string)

    def _break_edges(self, string: str, table: Mapping[str, str]) -> str:
        characters = list(string)
        for index in self._edges(string):
            characters[index] = table.get(characters[index], characters[index])
        return "".join(characters)

    def _edges(self, string: str) -> set[int]:
        """Where a control token might begin or go on that is not whole in `string`.

        Whitespace at the edges does not protect them, for templates trim.
        """
        found: set[int] = set()
        for view in {string, string.strip()} - {""}:
            start = string.index(view)
            if view.startswith(self._tails) or view in self._joined:
                found.add(start)
            if view.endswith(self._heads):
                found.update(start + len(view) - len(head) for head in self._heads if view.endswith(head))
        return found

    def _free_range(self, strings: Sequence[str]) -> int:
        """The first of as many private-use code points as there are characters to stand in for, none of them used."""
        used = {ord(character) for string in strings for character in string if ord(character) >= _PLANES[1][0]}
        size = len(self._alphabet)
        for first, end in _PLANES:
            for base in range(first, end - size, size):
                if not any(code in used for code in range(base, base + size)):
                    return base
        raise RequestError("the text uses up Unicode's private-use characters", hint="leave some of them out")


def _pattern(texts: Collection[str]) -> str:
    """A regular expression for any of them, the longest first, that takes each character of its input once."""
    rests: dict[str, list[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(text[0], []).append(text[1:])
    choices = [re.escape(first) + _pattern(rest) for first, rest in sorted(rests.items())]
    if "" in texts:
        return f"(?:{'|'.join(choices)})?" if choices else ""
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})" if choices else ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text has half a character (a lone surrogate) at {error.start}") from None
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
    elif not isinstance(value, int | float | None):
        raise RequestError(f"a template argument is a {type(value).__name__}", param="chat_template_kwargs")
