"""Answers of a form and calls of tools over HTTP, by the official client, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from scripted import serving
from triptych.media.text import Guides
from triptych.session import Prompt, Session
from triptych.testing import plan, tiny_session

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the sky does",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rom", "Oslo"]}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_session(plan(max_model_len=2048, num_blocks=512)) as session, serving(session) as made:
        yield made


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def say(text: str = "hello") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(client: openai.OpenAI, **body: Any) -> Any:
    body = {"model": "tiny", "messages": say(), "temperature": 0, "max_tokens": 120} | body
    return client.chat.completions.create(**body)


def streamed(client: openai.OpenAI, **body: Any) -> tuple[str, list[dict[str, Any]], str]:
    """The text, the calls and the finish of a streamed chat, put together as clients do."""
    text, calls, finish = "", [], ""
    for chunk in chat(client, stream=True, **body):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for piece in delta.tool_calls or ():
            if piece.index == len(calls):
                assert piece.type == "function"
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    return text, calls, finish


def schema(value: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": value, **facts}}


# ── forms ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("picture", [False, True])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("max_tokens", [40, 200])
def test_a_schema_holds_with_and_without_a_picture_and_the_answer_is_complete(client, picture, strict, max_tokens):
    parts = [{"type": "text", "text": "who?"}] + [{"type": "image_url", "image_url": {"url": PIXEL}}] * picture
    asked = {
        "messages": [{"role": "user", "content": parts}],
        "response_format": schema(PERSON, strict=strict),
        "max_tokens": max_tokens,
    }
    choice = chat(client, **asked).choices[0]
    jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert choice.finish_reason == "stop"
    assert streamed(client, **asked) == (choice.message.content, [], "stop")


def test_several_answers_each_have_the_form(client):
    answer = chat(client, response_format=schema(PERSON), n=3, temperature=1.5, seed=1)
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


def test_any_object_will_do_for_json_object(client):
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=20)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    with_schema = chat(client, response_format={"type": "json_object", "schema": PERSON})  # llama.cpp's
    jsonschema.validate(json.loads(with_schema.choices[0].message.content), PERSON)


def test_text_is_the_form_of_no_form(client):
    assert (
        chat(client, response_format={"type": "text"}).choices[0].message.content
        == chat(client).choices[0].message.content
    )


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"structured_outputs": {"json_object": True}}, r"(?s)\{.*\}"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"guided_choice": ["ja", "nein"]}, "ja|nein"),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"guided_json": '{"const": 7}'}, "7"),
        ({"response_format": schema({"const": 7})}, "7"),
    ],
)
def test_vllms_fields_hold_in_chats_and_in_texts(client, body, pattern):
    answer = client.chat.completions.create(model="tiny", messages=say(), max_tokens=30, extra_body=body)
    assert re.fullmatch(pattern, answer.choices[0].message.content)
    text = client.completions.create(model="tiny", prompt="hello", max_tokens=30, extra_body=body)
    assert re.fullmatch(pattern, text.choices[0].text)
    assert text.choices[0].finish_reason == "stop"


def test_a_form_is_compiled_once_for_all_prompts_and_they_share_what_it_may_cost(client, monkeypatch):
    forms, guides = [], []
    compile, start = Guides.compile, Session.start

    def compiled(self: Guides, *asked: Any) -> Any:
        forms.append(asked)
        return compile(self, *asked)

    def started(self: Session, prompt: Prompt, *how: Any, **facts: Any) -> Any:
        guides.append(prompt.guide)
        return start(self, prompt, *how, **facts)

    monkeypatch.setattr(Guides, "compile", compiled)
    monkeypatch.setattr(Session, "start", started)
    asked = {"guided_regex": "[a-c]{3}"}
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=9, extra_body=asked)

    assert all(re.fullmatch("[a-c]{3}", choice.text) for choice in answer.choices)
    assert len(forms) == 1
    assert guides == [guides[0]] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"response_format": schema({"type": "strin"})}, "strin", "response_format"),
        ({"response_format": schema({"uniqueItems": True}, strict=True)}, "uniqueItems", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "required", "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "xml", "response_format.type"),
        ({"response_format": schema(PERSON), "max_tokens": 5}, "takes", "max_tokens"),
        ({"response_format": schema(PERSON), "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"guided_regex": "(", "stream": False}, "unclosed", "response_format"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "each ask for a form", "guided_choice"),
        ({"structured_outputs": {}}, "asks for nothing", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "each ask", "structured_outputs.choice"),
        ({"guided_json": "{"}, "not a JSON schema", "guided_json"),
        ({"guided_choice": []}, "length >= 1", "guided_choice"),
        ({"tools": [WEATHER, WEATHER]}, "two tools", "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'", "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "matching regex", "tools[0].function.name"),
        ({"tool_choice": "required"}, "none of the 0", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "not served", "functions"),
        ({"messages": [{"role": "function", "name": "f", "content": "1"}]}, "tool_call_id", "messages[0].role"),
    ],
)  # fmt: skip
def test_a_form_or_tool_that_cannot_be_is_refused_before_any_stream(url, body, words, param, stream):
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": say(), "max_tokens": 50, "stream": stream} | body, timeout=20
    )
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("choices", "max_tokens"),
    [(["affirmative, that is certainly what the picture shows", "no"], 4), (["yes", "no"], 2), (["y", "n"], 1)],
)
def test_a_choice_that_fits_is_never_refused_nor_cut(client, choices, max_tokens):
    answer = chat(client, max_tokens=max_tokens, temperature=1.5, n=8, seed=1, extra_body={"guided_choice": choices})
    assert {choice.message.content for choice in answer.choices} <= set(choices)


# ── tools ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_asked_for_comes_and_its_arguments_are_valid(client, choice):
    asked = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    whole = chat(client, **asked).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.message.content is None
    assert whole.finish_reason == "tool_calls"
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    text, (same,), finish = streamed(client, **asked)
    assert (text, finish) == ("", "tool_calls")
    assert (same["name"], same["arguments"]) == (call.function.name, call.function.arguments)
    assert same["id"] != call.id


def test_a_tool_is_chosen_among_those_allowed(client):
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]},
    }
    answer = chat(client, tools=[WEATHER, TIME], tool_choice=allowed, parallel_tool_calls=False, max_tokens=200)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_time"]
    assert answer.choices[0].message.tool_calls[0].function.arguments == "{}"


def test_tools_that_may_not_be_called_are_not_shown(client):
    with_tools = chat(client, tools=[WEATHER], tool_choice="none")
    assert with_tools.choices[0].message.content == chat(client).choices[0].message.content
    assert with_tools.usage.prompt_tokens == chat(client).usage.prompt_tokens


def test_free_text_is_an_answer_where_no_call_is_needed(client):
    answer = chat(client, tools=[WEATHER])
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "body",
    [
        {"guided_choice": ["ja", "nein"]},
        {"guided_regex": "ja|nein"},
        {"guided_grammar": 'root ::= "ja" | "nein"'},
        {"structured_outputs": {"choice": ["ja", "nein"]}},
    ],
)
def test_beside_tools_a_form_of_any_kind_is_held(client, body):
    asked = {"tools": [WEATHER], "extra_body": body, "temperature": 1.5, "max_tokens": 200, "n": 4, "seed": 1}
    for choice in chat(client, **asked).choices:
        assert choice.message.tool_calls or choice.message.content in ("ja", "nein")


def test_a_call_goes_back_with_its_result_and_every_field_a_client_repeats(client):
    first = chat(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    said = first.choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
    asked = chat(client, messages=[*say(), said, result], tools=[WEATHER])
    assert asked.usage.prompt_tokens > first.usage.prompt_tokens
    picture = {
        **result,
        "content": [{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "so"}],
    }
    seen = chat(client, messages=[*say(), said.model_dump(), picture], tools=[WEATHER])
    assert seen.usage.prompt_tokens_details.image_tokens == 4


def test_an_answer_cut_off_in_a_call_says_so(client):
    long = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
    answer = chat(client, tools=[long], tool_choice="required", max_tokens=80)
    call = answer.choices[0].message.tool_calls[0]
    assert isinstance(json.loads(call.function.arguments), dict), "its end is kept in reach"
    assert answer.choices[0].finish_reason == "tool_calls"


def test_calls_in_parallel_have_ids_of_their_own(client):
    answer = chat(client, tools=[TIME], tool_choice="required", max_tokens=400, logit_bias={"10": 100, "130": 100})
    calls = answer.choices[0].message.tool_calls
    assert len({call.id for call in calls}) == len(calls)


def test_stop_strings_end_what_is_said_and_no_call(client):
    answer = chat(client, tools=[TIME], tool_choice="required", parallel_tool_calls=False, stop=["get_time", "\n"])
    assert answer.choices[0].message.tool_calls[0].function.name == "get_time"
