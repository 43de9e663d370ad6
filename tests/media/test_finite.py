"""Which schemas some finite text satisfies."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.media.text.finite import is_finite

SELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
LIST = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
PAIR = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
    },
}


@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        PAIR,
        {"$ref": "#"},
        {"allOf": [SELF["properties"]["a"]]},  # type: ignore[index]
        {**SELF, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}}},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "array", "minItems": 2, "prefixItems": [{"type": "null"}, {"$ref": "#"}]},
        {"type": "object", "required": ["a~/b"], "properties": {"a~/b": {"$ref": "#/properties/a~0~1b"}}},
    ],
)
def test_a_schema_whose_every_value_holds_another_has_no_end(schema: dict[str, Any]) -> None:
    assert not is_finite(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        LIST,
        {**SELF, "required": []},
        {**SELF, "type": ["object", "null"]},
        {**SELF, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {**PAIR, "$defs": {**PAIR["$defs"], "b": {"type": "string"}}},  # type: ignore[dict-item]
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}},
        {"$ref": "#/nowhere"},
        {"enum": [{"$ref": "#"}]},
    ],
)
def test_a_schema_that_may_stop_somewhere_has_an_end(schema: Any) -> None:
    assert is_finite(schema)
