"""Whether any finite text satisfies a JSON schema: references may demand one another without end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def is_finite(schema: Any) -> bool:
    """False where each value that the schema allows must hold another one of the same kind, for ever.

    The least fixed point over the schema's local references: those that can end, given those that are known to.
    What is not decided by references (patterns, bounds) counts as finite here; llguidance judges it.
    """
    targets = {name: _find(schema, name) for name in _references(schema)}
    ending = {name for name, target in targets.items() if target is None}  # no such place: refused elsewhere
    users: dict[str, set[str]] = {name: set() for name in targets}
    for name, target in targets.items():
        for used in _references(target):
            users[used].add(name)
    asked = set(targets) - ending
    while asked:
        if _ends(targets[name := asked.pop()], ending):
            ending.add(name)
            asked |= users[name] - ending
    return _ends(schema, ending)


def _ends(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return True
    if isinstance(name := schema.get("$ref"), str) and name.startswith("#") and name not in ending:
        return False
    if not all(_ends(part, ending) for part in _list(schema.get("allOf"))):
        return False
    for choice in (_list(schema.get("anyOf")), _list(schema.get("oneOf"))):
        if choice and not any(_ends(part, ending) for part in choice):
            return False
    return any(_kind_ends(kind, schema, ending) for kind in _kinds(schema))


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    kinds = schema.get("type", ["null", "object", "array"])
    return kinds if isinstance(kinds, list) else [kinds]


def _kind_ends(kind: Any, schema: Mapping[str, Any], ending: set[str]) -> bool:
    if kind == "object":
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        return all(_ends(known.get(name), ending) for name in _list(schema.get("required")) if isinstance(name, str))
    if kind == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
        first = _list(schema.get("prefixItems"))[:least]
        return all(_ends(item, ending) for item in first) and (
            len(first) == least or _ends(schema.get("items"), ending)
        )
    return True


def _references(schema: Any) -> set[str]:
    found, parts = set[str](), [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            name = part.get("$ref")
            if isinstance(name, str) and name.startswith("#"):
                found.add(name)
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return found


def _find(schema: Any, reference: str) -> Any:
    """Where a JSON pointer (RFC 6901) leads; None where it leads nowhere."""
    place = schema
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            place = dict(enumerate(place)).get(int(name)) if name.isdecimal() else None
        else:
            place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
