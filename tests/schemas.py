"""JSON schemas at random: what people write, nested and of every type."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "tags", "x", "größe", "is_open", "due date", "$id_", "children", 'a"quote')
PATTERNS = ("^[a-z]{1,8}$", "^[A-Z][0-9]{2,4}$", r"^\d{3}-\d{4}$", "^(red|green|blue)$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(rng: random.Random, *, depth: int = 3) -> dict[str, Any]:
    """One schema of one object, some with definitions that refer to one another."""
    schema = _object(rng, depth)
    if rng.random() < 0.2:
        schema["$defs"] = {"node": _node(rng)}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        schema["required"] = [*schema.get("required", []), "tree"]
    return schema


def _node(rng: random.Random) -> dict[str, Any]:
    """A list or a tree of itself."""
    return {
        "type": "object",
        "properties": {
            "value": _scalar(rng),
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_scalar, _scalar, _scalar]
    if depth:
        kinds += [
            lambda rng: _object(rng, depth - 1),
            lambda rng: _array(rng, depth - 1),
            lambda rng: _union(rng, depth),
        ]
    return rng.choice(kinds)(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    required = [name for name in names if rng.random() < 0.6]
    if required or rng.random() < 0.5:
        schema["required"] = required
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, False, {"type": "integer"}])
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _any(rng, depth)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.5:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 3)
    return schema


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "minLength": rng.randint(0, 5), "maxLength": rng.randint(5, 30)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"enum": rng.sample(["red", "green", 3, None, "a b", "\u00e9\n"], 3)},
            {"const": rng.choice(["fixed", 7, True])},
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "number"},
            {"type": "number", "exclusiveMinimum": low},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
        ]
    )
