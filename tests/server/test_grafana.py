"""Every panel of the Grafana dashboard asks for what a server really exports, in PromQL that parses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asking import png, see
from scripted import serving
from triptych.testing import tiny_session

BOARD = json.loads((Path(__file__).parents[2] / "docs/grafana/triptych.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The label names of each sample, of a server that has answered, looked and refused."""
    with tiny_session() as session, serving(session) as url:
        for messages in (see("What is it?", png(90)), see("Hello")):
            asked = {"messages": messages, "max_tokens": 4}
            assert httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": []}).status_code == 400
        families = list(text_string_to_metric_families(httpx.get(f"{url}/metrics").text))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def selectors(node: Any) -> Iterator[Any]:
    """The vector selectors of an expression."""
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield node.vector_selector
        case promql_parser.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            yield from selectors(node.expr)
        case promql_parser.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql_parser.NumberLiteral():
            return
        case _:
            raise AssertionError(f"the test does not know {type(node).__name__}")


def groupings(node: Any) -> Iterator[str]:
    """The labels that an expression keeps apart."""
    match node:
        case promql_parser.AggregateExpr():
            yield from node.modifier.labels if node.modifier else ()
            yield from groupings(node.expr)
        case promql_parser.Call():
            for argument in node.args:
                yield from groupings(argument)
        case promql_parser.BinaryExpr():
            yield from groupings(node.lhs)
            yield from groupings(node.rhs)


def parse(target: dict[str, Any]) -> Any:
    return promql_parser.parse(target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*"))


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title}: {target['refId']}" for title, target in TARGETS])
def test_a_panel_asks_for_what_is_exported(title, target, exported):
    tree = parse(target)
    found = list(selectors(tree))
    assert found
    for selector in found:
        assert selector.name in exported, f"{title} asks for {selector.name}"
        labels = exported[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} == {"model_name"}
        assert set(groupings(tree)) <= labels
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= (set(groupings(tree)) or labels)


def test_every_family_that_is_exported_has_its_panel(exported):
    asked = {selector.name for _, target in TARGETS for selector in selectors(parse(target))}
    families = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in exported}

    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked} == families


def test_stages_of_both_modalities_are_exported_from_end_to_end(exported):
    with tiny_session() as session, serving(session) as url:
        asked = {"messages": see("What is it?", png(91)), "max_tokens": 4}
        assert httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).status_code == 200
        text = httpx.get(f"{url}/metrics").text
    stages = {
        (sample.labels["stage"], sample.labels["modality"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "triptych:stage_seconds_count" and sample.value
    }

    assert stages >= {(stage, "image") for stage in ("fetch", "unpack", "preprocess", "queue", "encode", "project")}
    assert stages >= {("prefill", "image"), ("decode", "text"), ("tokenize", "text"), ("detokenize", "image")}


def test_panels_have_their_own_ids_and_places():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    places = [tuple(panel["gridPos"].values()) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in BOARD["panels"])
