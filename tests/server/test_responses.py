"""`/v1/responses` by the official `openai` client, unmodified, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from scripted import IMAGE_TOKENS, ScriptedSession, serving
from triptych.core.chat import ImagePart, TextPart, Tool, ToolCall
from triptych.server.openai import answers

PIXEL = "data:image/png;base64,iVBORw0KGgo="
LOOK = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def session() -> ScriptedSession:
    return ScriptedSession()


@pytest.fixture(scope="module")
def client(session: ScriptedSession) -> Iterator[openai.OpenAI]:
    with serving(session) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(client: openai.OpenAI, text: str, **more: Any) -> list[Any]:
    return list(client.responses.create(model="scripted", input=text, stream=True, **more))


def test_a_text_is_answered_whole(client):
    answer = client.responses.create(model="scripted", input="red ends", metadata={"who": "me"})

    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "RED ENDS ")
    assert answer.output[0].content[0].annotations == []
    assert answer.usage.input_tokens == 2
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert (answer.store, answer.metadata, answer.tool_choice) == (False, {"who": "me"}, "auto")
    assert answer.triptych["ttft_s"] > 0


def test_an_answer_that_a_limit_cut_is_incomplete(client):
    answer = client.responses.create(model="scripted", input="red", max_output_tokens=3)

    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.max_output_tokens == 3
    longest = client.responses.create(model="scripted", input="red", max_output_tokens=10**6)
    assert longest.usage.total_tokens == 1000


def test_a_conversation_comes_whole_and_stays_in_order(client, session):
    client.responses.create(
        model="scripted",
        instructions="be brief",
        max_output_tokens=1,
        input=[
            {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL, "detail": "low"}, says("a")]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [says("sea"), {"type": "input_image", "image_url": PIXEL, "detail": "auto"}]},  # noqa: E501
            {"type": "function_call_output", "call_id": "c2", "output": "sky"},
            {"role": "developer", "content": "go on"},
            {"role": "user", "content": "red"},
        ],
        tools=[LOOK],
    )  # fmt: skip
    chat = session.chats[-1]

    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "tool", "tool", "system", "user"]
    assert chat.messages[1].parts == (ImagePart(source=PIXEL, detail="low"), TextPart(text="a"))
    assert chat.messages[2].parts == (TextPart(text="b"),)
    assert chat.messages[2].tool_calls == tuple(ToolCall(id=i, name="look", arguments="{}") for i in ("c1", "c2"))
    assert chat.messages[3].parts == (TextPart(text="sea"), ImagePart(source=PIXEL))
    assert [m.tool_call_id for m in chat.messages[3:5]] == ["c1", "c2"]
    assert chat.tools == (Tool(name="look", description="Look.", parameters={"type": "object"}),)
    assert session.prompts[-1].num_tokens == 9 + 2 * IMAGE_TOKENS


def says(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def test_output_may_be_sent_back_as_input(client, session):
    first = client.responses.create(model="scripted", input="calls", tools=[LOOK])
    output = [{"type": "function_call_output", "call_id": c.call_id, "output": "x"} for c in first.output[1:]]
    again = client.responses.create(model="scripted", input=[*first.output, *output, {"role": "user", "content": "a"}])

    assert again.status == "incomplete"
    assert session.chats[-1].messages[0].tool_calls[0] == ToolCall(id="call_1", name="look", arguments='{"at": "sea"}')


def test_a_stream_has_every_event_in_its_order(client):
    found = events(client, "red ends")

    assert [event.type for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert found[0].response.status == "in_progress"
    assert found[2].item.content == []
    assert {event.item_id for event in found[3:8]} == {found[2].item.id} == {found[8].item.id}
    assert found[6].text == found[7].part.text == found[8].item.content[0].text == "RED ENDS "
    assert found[-1].response.output == [found[8].item]
    assert found[-1].response.usage.output_tokens == 2


def test_a_streamed_call_is_an_item_of_its_own(client):
    found = events(client, "calls", tools=[LOOK])
    items = [event.item for event in found if event.type == "response.output_item.done"]
    pieces = [event for event in found if event.type == "response.function_call_arguments.delta"]
    done = [event for event in found if event.type == "response.function_call_arguments.done"]
    added = [event.item for event in found if event.type == "response.output_item.added"]

    assert [item.type for item in items] == ["message", "function_call", "function_call"]
    assert [(piece.output_index, piece.delta) for piece in pieces] == [(1, '{"at": '), (1, '"sea"}'), (2, "{}")]
    assert [one.arguments for one in done] == ['{"at": "sea"}', "{}"]
    assert [one.arguments for one in added[1:]] == ["", ""]
    assert [item.call_id for item in items[1:]] == ["call_1", "call_2"]
    assert found[-1].response.output == items
    whole = client.responses.create(model="scripted", input="calls", tools=[LOOK])
    assert [one.model_dump(exclude={"id"}) for one in whole.output] == [one.model_dump(exclude={"id"}) for one in items]


def test_the_clients_own_helper_puts_a_stream_together(client):
    with client.responses.stream(model="scripted", input="red ends") as stream:
        final = stream.get_final_response()
    assert final.output_text == "RED ENDS "


def test_logprobs_are_included_where_asked(client):
    include = ["message.output_text.logprobs"]
    answer = client.responses.create(
        model="scripted", input="red green", max_output_tokens=2, include=include, top_logprobs=2
    )
    logprobs = answer.output[0].content[0].logprobs
    assert [one.token for one in logprobs] == ["RED ", "GREEN "]
    assert [len(one.top_logprobs) for one in logprobs] == [2, 2]
    with pytest.raises(openai.BadRequestError, match="needs `include"):
        client.responses.create(model="scripted", input="red", top_logprobs=2)


def test_a_stream_lists_each_tokens_probability_once_and_repeats_it_with_what_is_done(client, monkeypatch):
    spelt, spell = [], answers.chat_logprobs
    monkeypatch.setattr(answers, "chat_logprobs", lambda given: spelt.extend(given) or spell(given))
    include = ["message.output_text.logprobs"]
    found = events(client, "red green", max_output_tokens=3, include=include, top_logprobs=2)
    by_kind = {event.type: event for event in found}
    pieces = [event.logprobs for event in found if event.type == "response.output_text.delta"]

    assert [one.token for one in spelt] == ["RED ", "GREEN ", "RED "]
    assert [len(piece) for piece in pieces] == [1, 1, 1]
    assert len(by_kind["response.output_text.done"].logprobs) == 3
    assert len(by_kind["response.output_item.done"].item.content[0].logprobs) == 3
    assert len(by_kind["response.incomplete"].response.output[0].content[0].logprobs) == 3


def test_a_failure_in_mid_stream_is_an_error_and_a_failed_response(client):
    found = events(client, "breaks now", max_output_tokens=9)

    assert [event.type for event in found[-2:]] == ["error", "response.failed"]
    assert found[-1].response.error.message == "the device is gone"
    assert [event.sequence_number for event in found] == list(range(len(found)))


def test_a_failure_before_the_first_token_is_a_status(client):
    with pytest.raises(openai.InternalServerError, match="9 GB"):
        events(client, "refused")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("previous_response_id", "resp_1", "send the whole conversation"),
        ("store", True, "never stored"),
        ("background", True, "while its caller waits"),
        ("conversation", "conv_1", "send the whole conversation"),
        ("truncation", "auto", "never cut in silence"),
        ("reasoning", {"effort": "high"}, "does not reason"),
        ("max_tokens", 3, "called `max_output_tokens`"),
        ("tools", [{"type": "web_search"}], "send only `function`"),
        ("tool_choice", "required", "none of the 0 `tools`"),
        ("tool_choice", {"type": "function", "name": "x"}, "none of the 0 `tools`"),
        ("input", [{"type": "item_reference", "id": "x"}], "not a kind that is served"),
        ("input", [{"type": "reasoning", "id": "x"}], "not a kind that is served"),
        ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "no file"),
        ("input", [{"role": "user", "content": [{"type": "input_audio"}]}], "no audio"),
        ("input", [], "length >= 1"),
        ("input", 3, "expected"),
        ("inputs", "a", "did you mean `input`?"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client, field, value, words):
    body = {"input": "a", field: value}
    answer = httpx.post(f"{client.base_url}responses", json=body)

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].split("[")[0] == field


def test_a_prompt_that_is_too_long_is_named_as_it_was_sent(client):
    url, text = str(client.base_url), "a " * 2000
    for path, body, name in (
        ("responses", {"input": text}, "input"),
        ("completions", {"prompt": text}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = httpx.post(url + path, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", name)


def test_fields_that_ask_for_nothing_are_taken(client):
    neutral = {
        "store": False, "background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"],
        "reasoning": None, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "user": "me",
        "prompt_cache_key": "k", "service_tier": "auto", "parallel_tool_calls": True, "tools": [], "stream": False,
        "tool_choice": "auto", "top_p": 1.0, "temperature": 0, "previous_response_id": None, "max_tool_calls": 3,
    }  # fmt: skip
    answer = httpx.post(f"{client.base_url}responses", json={"input": "red ends", **neutral})
    assert answer.status_code == 200, answer.text


def test_a_format_becomes_the_form_of_the_answer():
    from triptych.server.responses.responses import ResponsesDialect

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    read = ResponsesDialect().read
    assert read({"input": "a", "text": {"format": format}}).form.value == schema
    assert read({"input": "a", "text": {"format": {"type": "json_object"}}}).form.kind == "json"
    assert read({"input": "a", "text": {"format": {"type": "json_object", "schema": schema}}}).form.value == schema
    called = read({"input": "a", "tools": [LOOK], "tool_choice": {"type": "function", "name": "look"}}).form
    assert (called.kind, called.value, called.is_needed) == ("tools", ("look",), True)
    assert read({"input": "a", "tools": [LOOK], "tool_choice": "none"}).form is None
    either = read({"input": "a", "tools": [LOOK], "text": {"format": format}}).form
    assert (either.kind, either.is_needed, either.otherwise.value) == ("tools", False, schema)


def test_events_carry_their_names(client):
    body = {"input": "red ends", "stream": True}
    text = httpx.post(f"{client.base_url}responses", json=body).text
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data[6:])['type']}"
