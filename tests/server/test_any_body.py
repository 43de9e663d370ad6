"""Whatever is sent, the answer is 200 or a 4xx in OpenAI's form: never a 500, never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from scripted import serving
from triptych.server.anthropic.bodies import MessagesBody
from triptych.server.openai.bodies import ChatBody, CompletionBody
from triptych.server.openai.fields import CHAT_REFUSED
from triptych.server.responses.bodies import ResponsesBody
from triptych.session import Session
from triptych.testing import tiny_session

SCALARS = some.none() | some.booleans() | some.integers(-5, 2**70) | some.floats(-5, 5) | some.text(max_size=5)
THINGS = some.recursive(
    SCALARS,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PARTS = some.fixed_dictionaries(
    {},
    optional={
        "type": some.sampled_from(["text", "image_url", "input_audio"]) | THINGS,
        "text": some.text(max_size=9) | THINGS,
        "image_url": some.sampled_from(["data:,", "data:image/png;base64,iVBORw0KGgo=", "file:///x"]) | THINGS,
    },
)
MESSAGES = some.fixed_dictionaries(
    {"role": some.sampled_from(["user", "system", "assistant", "tool"]) | THINGS},
    optional={"content": some.text(max_size=9) | some.lists(PARTS, max_size=3) | THINGS, "name": THINGS},
)
CHAT_FIELDS = [name for name in (*ChatBody.__struct_fields__, *CHAT_REFUSED) if name not in ("messages", "max_tokens")]
TEXT_FIELDS = [name for name in CompletionBody.__struct_fields__ if name not in ("prompt", "max_tokens")]

HI = [{"role": "user", "content": "hi"}]
FUNCTION = '"name": "f", "parameters": %s'


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    session: Session
    with tiny_session() as session, serving(session) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@settings(max_examples=70, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    messages=some.lists(MESSAGES, max_size=3) | THINGS,
    others=some.dictionaries(some.sampled_from(CHAT_FIELDS) | some.text(max_size=9), THINGS, max_size=2),
)
def test_any_chat(http: httpx.Client, messages: Any, others: dict[str, Any]) -> None:
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, **others}
    check(http.post("/v1/chat/completions", content=msgspec.json.encode(body)))


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompt=some.text(max_size=9) | some.lists(some.integers(-2, 1100), max_size=4) | THINGS,
    others=some.dictionaries(some.sampled_from(TEXT_FIELDS) | some.text(max_size=9), THINGS, max_size=2),
)
def test_any_completion(http: httpx.Client, prompt: Any, others: dict[str, Any]) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **others}
    check(http.post("/v1/completions", content=msgspec.json.encode(body)))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=some.sampled_from(CHAT_FIELDS), value=THINGS)
def test_any_value_of_a_field_of_a_good_chat(http: httpx.Client, name: str, value: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0, name: value}
    check(http.post("/v1/chat/completions", content=msgspec.json.encode(body)))


@pytest.mark.parametrize(
    "arguments", [{"messages": []}, {"add_generation_prompt": False}, {"bos_token": "x"}, {"self": 1}, {"a-b": [1]}]
)
def test_template_arguments_cannot_break_the_template(http: httpx.Client, arguments: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "chat_template_kwargs": arguments}
    check(http.post("/v1/chat/completions", content=msgspec.json.encode(body)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("large", [False, True])  # parsed on the loop, or in a thread, which has more room
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("responses", {"input": "hi", "tool_choice": "none"}, '"tools": [{"type": "function", ' + FUNCTION + "}]"),
        ("responses", {"input": "hi"}, '"text": {"format": {"type": "json_schema", "name": "f", "schema": %s}}'),
        ("chat/completions", {"messages": HI}, '"tools": [{"type": "function", "function": {' + FUNCTION + "}}]"),
        ("chat/completions", {"messages": HI}, '"mm_processor_kwargs": {"size": %s}'),
        ("chat/completions", {"messages": HI}, '"chat_template_kwargs": {"size": %s}'),
    ],
)  # fmt: skip
def test_what_is_nested_deeply_is_answered_or_refused_wherever_it_is_read(http, path, body, field, stream, large):
    plain = msgspec.json.encode(body | {"stream": stream, "user": "x" * 70_000 * large}).decode()
    for depth in (10, 190, 250, *range(900, 1000, 15)):
        nested = field % ('{"a":' * depth + "1" + "}" * depth)
        answer = http.post(f"/v1/{path}", content=f"{plain[:-1]}, {nested}}}")
        check(answer)
        if depth > 200:
            assert "deep" in answer.json()["error"]["message"] or "recursion" in answer.text


ITEMS = some.fixed_dictionaries(
    {},
    optional={
        "type": some.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | THINGS,
        "role": some.sampled_from(["user", "assistant", "developer"]) | THINGS,
        "content": some.text(max_size=9) | some.lists(PARTS, max_size=3) | THINGS,
        "output": some.text(max_size=9) | THINGS,
        "call_id": some.text(max_size=3) | THINGS,
        "name": some.text(max_size=3) | THINGS,
        "arguments": some.text(max_size=9) | THINGS,
    },
)
BLOCKS = some.fixed_dictionaries(
    {"type": some.sampled_from(["text", "image", "tool_use", "tool_result", "thinking"]) | THINGS},
    optional={
        "text": some.text(max_size=9) | THINGS,
        "source": some.fixed_dictionaries({"type": some.just("base64"), "media_type": THINGS, "data": THINGS}) | THINGS,
        "id": some.text(max_size=3) | THINGS,
        "name": some.text(max_size=3) | THINGS,
        "input": THINGS,
        "tool_use_id": some.text(max_size=3) | THINGS,
        "content": THINGS,
    },
)
RESPONSE_FIELDS = [name for name in ResponsesBody.__struct_fields__ if name not in ("input", "max_output_tokens")]
MESSAGE_FIELDS = [name for name in MessagesBody.__struct_fields__ if name not in ("messages", "max_tokens")]


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    asked=some.text(max_size=9) | some.lists(ITEMS, max_size=3) | THINGS,
    others=some.dictionaries(some.sampled_from(RESPONSE_FIELDS) | some.text(max_size=9), THINGS, max_size=2),
)
def test_any_response(http: httpx.Client, asked: Any, others: dict[str, Any]) -> None:
    body = {"input": asked, "max_output_tokens": 2, **others}
    check(http.post("/v1/responses", content=msgspec.json.encode(body)))


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    content=some.text(max_size=9) | some.lists(BLOCKS, max_size=3) | THINGS,
    others=some.dictionaries(some.sampled_from(MESSAGE_FIELDS) | some.text(max_size=9), THINGS, max_size=2),
)
def test_any_message(http: httpx.Client, content: Any, others: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **others}
    check(http.post("/v1/messages", content=msgspec.json.encode(body)))
