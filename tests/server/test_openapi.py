"""The OpenAPI document is true: every path is in it, and what it says of bodies and answers is what happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from scripted import ScriptedSession, serving
from triptych import errors
from triptych.errors import RequestError
from triptych.server.app import create_app
from triptych.server.openapi import OPERATIONS, REFUSALS, document
from triptych.testing import tiny_session


def no_fault_of_ours(context: Any, response: Any, case: schemathesis.Case) -> None:
    """What was given too little time may end with 504."""
    assert response.status_code != 500, response.text


CHECKS = [
    no_fault_of_ours,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
UNLISTED = {"/v1/embeddings", "/openapi.json", "/", "/page/{name}"}  # refused, this, and the page

USER = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/media/inspect": {"messages": USER},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
DEMANDING = {"model", "messages", "max_completion_tokens", "n", "tool_choice", "priority"}
EXAMPLES = int(os.environ.get("TRIPTYCH_EXAMPLES", "3"))  # of each path; a thousand find more

api = schemathesis.openapi.from_dict(document())
some = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_session() as session, serving(session) as url:
        yield url


@api.parametrize()
@some
def test_any_request_is_answered_as_the_document_says(url: str, case: schemathesis.Case) -> None:
    """Right and wrong ones, half and half: what the document forbids is refused."""
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)


@api.include(path=list(GOOD)).parametrize()
@some
def test_a_good_request_with_any_two_fields_more_is_answered_as_the_document_says(url: str, case: Any) -> None:
    good = GOOD[case.operation.path]
    others = case.body.items() if isinstance(case.body, dict) else ()
    case.body = dict([one for one in others if one[0] not in DEMANDING][:2]) | good
    case.call_and_validate(base_url=url, checks=CHECKS[:-1], timeout=60)


def test_every_path_is_in_the_document():
    routes = {route.path for route in create_app(ScriptedSession()).routes if isinstance(route, Route)}
    assert {path.replace(":path", "") for path in routes} - UNLISTED == {one.path for one in OPERATIONS}
    assert set(document()["paths"]) == {one.path for one in OPERATIONS}


def test_every_reference_leads_somewhere():
    schemas = document()["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            for one in value.values():
                yield from references(one)
        elif isinstance(value, list):
            for one in value:
                yield from references(one)

    found = set(references(document()))
    assert len(found) > 40
    assert {reference.removeprefix("#/components/schemas/") for reference in found} <= set(schemas)


def test_fields_that_are_refused_say_why_and_what_is_taken():
    chat = document()["components"]["schemas"]["ChatBody"]
    assert chat["properties"]["store"] == {
        "enum": [None, False],
        "description": "Not served: answers are never stored.",
    }
    assert chat["properties"]["user"] == {"description": "Changes no answer."}
    assert chat["additionalProperties"] == {"type": "null"}
    assert chat["required"] == ["messages"]


def test_every_status_that_an_error_may_have_is_in_the_document():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)]
    assert {kind.status for kind in kinds} | {500} == set(REFUSALS)


def test_it_is_served(url):
    answer = httpx.get(f"{url}/openapi.json")
    assert answer.json() == document()
    assert answer.headers["content-type"] == "application/json"
