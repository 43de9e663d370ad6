"""A JSON body to a record: exact types and ranges, and no field is ignored in silence.

A field either does what the API says, or is listed as bookkeeping that changes no answer, or is refused by name
unless it asks for what happens anyway. An unknown field is refused too: a misspelt `max_token` that is ignored
costs its caller more than a 400. Each dialect lists its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from triptych.core.policy import Compression
from triptych.errors import RequestError

MAX_VALUES = 5 << 18  # in one body, besides its texts: 64 MB of `{},` would become 1.5 GB, and stop all threads
MAX_DEPTH = 200  # of arrays and objects in one another; what walks through them later has room for a few hundred calls
SHOWN = 100  # characters of a caller's own words that an answer repeats

Record = TypeVar("Record", bound=msgspec.Struct)

# Known, not served: (values that ask for nothing, what to say). None always asks for nothing.
Refused = Mapping[str, tuple[tuple[Any, ...], str]]


class Exact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record without room for a misspelt field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields(Generic[Record]):
    """What an object may hold: a record's own fields, those that change no answer, and those refused by name."""

    record: type[Record]
    ignored: frozenset[str] = frozenset()
    refused: Refused = field(default_factory=dict)

    @property
    def served(self) -> frozenset[str]:
        return frozenset(self.record.__struct_encode_fields__)


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body holds. Raises RequestError."""
    num_nested = raw.count(b"[") + raw.count(b"{")
    num_values = num_nested + raw.count(b",")  # or a few less, where texts have such marks too
    if num_values > MAX_VALUES:
        raise RequestError(
            f"the body has about {num_values:,} values, the limit is {MAX_VALUES:,}", hint="ask in several requests"
        )
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = "it is empty" if not raw.strip() else str(error)[:200]
        raise RequestError(
            f"the body ({len(raw):,} bytes) is not valid JSON: {reason}",
            hint='send one JSON object, encoded as UTF-8, such as {"model": …, "messages": […]}',
        ) from None
    if not isinstance(content, dict):
        raise RequestError(f"the body is a JSON {_json_name(content)}, not an object", hint='send {"model": …, …}')
    if num_nested > MAX_DEPTH and (depth := _depth(content)) > MAX_DEPTH:
        raise RequestError(f"the body is nested {depth:,} deep, the limit is {MAX_DEPTH}", hint="send flatter values")
    return content


def convert(content: dict[str, Any], fields: Fields[Record]) -> Record:
    """The record that an object's fields make. Raises RequestError that names the field."""
    try:
        return msgspec.convert(freed(content, fields), fields.record, str_keys=True)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None


def freed(content: Mapping[str, Any], fields: Fields[Any], *, where: str = "") -> dict[str, Any]:
    """The fields of an object that are served. Raises RequestError for any other that asks for something."""
    check(content, fields, where=where)
    return {name: value for name, value in content.items() if name in fields.served}


def compression(asked: Mapping[str, Any] | None) -> Compression:
    """What a body's `triptych` asks to leave out. Raises RequestError."""
    return Compression(**freed(asked or {}, Fields(record=Compression), where="triptych."))


def check(content: Mapping[str, Any], fields: Fields[Any], *, where: str = "") -> None:
    """Refuse what is unknown, and what is known but asks for something that is not served."""
    known = fields.served | fields.ignored
    for name, value in content.items():
        if name in known or value is None:
            continue
        param = f"{where}{name}"
        if name not in fields.refused:
            raise _unknown(param, name, known)
        neutral, hint = fields.refused[name]
        if not any(value == one and type(value) is type(one) for one in neutral):
            raise RequestError(f"`{param}` is not served", hint=hint, param=param)


def _unknown(param: str, name: str, known: frozenset[str]) -> RequestError:
    near = difflib.get_close_matches(name[:SHOWN], sorted(known), n=1, cutoff=0.6)
    hint = f"did you mean `{near[0]}`?" if near else "leave it out; docs/guides/serve.md lists the fields"
    return RequestError(f"unknown field `{param[:SHOWN]}`", hint=hint, param=param[:SHOWN])


def _wrong_type(message: str) -> RequestError:
    text, _, path = message.partition(" - at `")
    param = re.sub(r"^(key` in `)?\$\.?", "", path[-SHOWN:]).rstrip("`")[:SHOWN] or None
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"`{param}` is required", param=param, hint="docs/guides/serve.md shows a whole body")
    unknown = re.match(r"Object contains unknown field `(.*)`", text)
    if unknown:
        name = unknown[1][:SHOWN]
        param = f"{param}.{name}" if param else name
        return RequestError(f"unknown field `{param}`", param=param, hint="leave it out")
    text = text[:1].lower() + text[1 : 2 * SHOWN].replace(" | null`", "`")
    return RequestError(f"`{param}`: {text}" if param else text, param=param)


def _depth(content: object) -> int:
    """How many arrays and objects lie in one another; a limit of Python's would depend on who asks."""
    depth, level = 0, [content]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _json_name(content: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(content), "null")
