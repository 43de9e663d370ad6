"""Forms that grow: one piece again and again, chained, nested or doubled, as far as a form may reach."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

SIZES = (2, 20, 200, 2_000, 20_000)
UNITS = (
    "a",
    "x*",
    "x?",
    "(a|b)*",
    "[ab]{1,9}",
    "(",
    ")",
    "[",
    "\\d+",
    "(?:a",
    "|",
    ".*a",
    " ",
    "\n",
    "\\",
    '"',
    "a{1,99}",
)
LEAVES: tuple[Any, ...] = (
    {"type": "string", "pattern": "a*b"}, {"type": "integer", "multipleOf": 7}, {"enum": [1, "a", None]}, True, {},
    {"type": "string", "format": "email"}, {"type": "array", "minItems": 2}, {"const": "x" * 999},
)  # fmt: skip

Step = Callable[[Any], Any]  # a schema that leads on to another
STEPS: tuple[Step, ...] = (
    lambda on: on,
    lambda on: {"allOf": [on, on]},
    lambda on: {"anyOf": [on, on]},
    lambda on: {"anyOf": [on, {"type": "null"}]},
    lambda on: {"oneOf": [on, on]},
    lambda on: {"allOf": [{"properties": {"p": on}}, {"properties": {"p": on}}]},
    lambda on: {"type": "object", "properties": {"p": on, "q": on}, "required": ["p"]},
    lambda on: {"type": "array", "items": on, "minItems": 1},
    lambda on: {"type": "array", "prefixItems": [on, on], "items": on},
    lambda on: {"type": "object", "additionalProperties": on},
    lambda on: {"type": "object", "patternProperties": {"^(a|b)*$": on}},
)
RULES = ("r{0}: r{1}\n", 'r{0}: "a" r{1} | "b"\n', "r{0}: r{1} r{1}\n", "r{0}: r{1}? r{1}*\n",
         'r{0}: ("a" r{1} "b")+\n',
         "R{0}: R{1} R{1}\n", 'R{0}: "a" R{1} "b"\n', "R{0}: ~R{1}\n", "R{0}: R{1} & /a*b*/\n",
         "r{0} ::= r{1} | r{1} r{1}\n", "\n", " \n", "# \n", "%ignore /x{0}/\n")  # fmt: skip


def form(rng: Random) -> dict[str, Any]:
    """Fields of a chat that ask for a form which grew."""
    kind = rng.choice(("schema", "tool", "grammar", "regex", "choice"))
    if kind == "schema":
        strict = rng.random() < 0.5
        named = {"name": "grown", "strict": strict, "schema": schema(rng)}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if kind == "tool":
        function = {"name": "grown", "parameters": {"type": "object", "properties": {"a": {}}, **schema(rng)}}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": rng.choice(("auto", "required"))}
    if kind == "choice":
        return {"guided_choice": [rng.choice(UNITS) * min(9, at) + str(at) for at in range(min(_size(rng), 2_000))]}
    return {f"guided_{kind}": grammar(rng) if kind == "grammar" else "".join(rng.choices(UNITS, k=2)) * _size(rng)}


def schema(rng: Random) -> dict[str, Any]:
    """References one behind the other; the last leads to a leaf, or back to the first."""
    number, steps = min(_size(rng), 2_000), rng.choices(STEPS, k=rng.choice((1, 1, 3)))
    defs = {f"d{at}": steps[at % len(steps)]({"$ref": f"#/$defs/d{at + 1}"}) for at in range(number)}
    end = {"$ref": "#/$defs/d0"} if rng.random() < 0.2 else rng.choice(LEAVES)
    return {"$defs": {**defs, f"d{number}": end}, "$ref": "#/$defs/d0"}


def grammar(rng: Random) -> str:
    number, rules = min(_size(rng), 5_000), rng.choices(RULES, k=rng.choice((1, 1, 2)))
    text = "".join(rules[at % len(rules)].format(at, at + 1) for at in range(number))
    return f'start: r0 | R0\n{text}r{number}: "c"\nR{number}: /{rng.choice(UNITS) * rng.choice((1, 9, 99))}/\n'


def _size(rng: Random) -> int:
    return rng.choice(SIZES)
