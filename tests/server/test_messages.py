"""`/v1/messages` by the official `anthropic` client, unmodified, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from scripted import ScriptedSession, serving
from triptych.core.chat import ImagePart, TextPart, Tool, ToolCall
from triptych.server.config import ServerConfig

BASE64 = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def session() -> ScriptedSession:
    return ScriptedSession()


@pytest.fixture(scope="module")
def client(session: ScriptedSession) -> Iterator[anthropic.Anthropic]:
    config = ServerConfig(api_keys=("sesame",))
    with serving(session, config) as url, anthropic.Anthropic(base_url=url, api_key="sesame", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, text: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.messages.create(**{"model": "scripted", "max_tokens": 50, "messages": messages, **more})


def test_a_message_is_answered_whole(client):
    answer = ask(client, "red ends")

    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert [(block.type, block.text) for block in answer.content] == [("text", "RED ENDS ")]
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (2, 0, 2)
    assert answer._request_id


def test_why_it_ended(client):
    assert ask(client, "red", max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, "red green blue", stop_sequences=["GREEN"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "GREEN")
    assert stopped.content[0].text == "RED "
    full = ask(client, "red", max_tokens=10_000)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == 1000


def test_a_conversation_stays_in_order_with_its_pictures_in_place(client, session):
    image = {"type": "image", "source": BASE64, "cache_control": {"type": "ephemeral"}}
    client.messages.create(
        model="scripted",
        max_tokens=1,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        tools=[LOOK],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, image]},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}}]},  # noqa: E501
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [image, {"type": "text", "text": "c"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "no"},
                {"type": "text", "text": "red"},
            ]},
        ],
    )  # fmt: skip
    chat = session.chats[-1]
    picture = ImagePart(source="data:;base64,iVBORw0KGgo=")

    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert chat.messages[1].parts == (TextPart(text="a"), picture)
    assert chat.messages[2].tool_calls == (ToolCall(id="t1", name="look", arguments='{"at":"sea"}'),)
    assert chat.messages[3].parts == (picture, TextPart(text="c"))
    assert [m.tool_call_id for m in chat.messages[3:5]] == ["t1", "t2"]
    assert chat.messages[4].parts == (TextPart(text="Error: "), TextPart(text="no"))
    assert chat.messages[5].parts == (TextPart(text="red"),)
    assert chat.tools == (Tool(name="look", description="Look.", parameters={"type": "object"}),)


def test_a_picture_may_be_a_url(client, session):
    content = [{"type": "image", "source": {"type": "url", "url": "https://x/a.png"}}, {"type": "text", "text": "a"}]
    client.messages.create(model="scripted", max_tokens=1, messages=[{"role": "user", "content": content}])
    assert session.chats[-1].messages[0].parts[0] == ImagePart(source="https://x/a.png")


def test_a_stream_has_every_event_in_its_order(client):
    found = list(ask(client, "red ends", stream=True))

    assert [event.type for event in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0].message.content == []
    assert found[0].message.stop_reason is None
    assert found[0].message.usage.input_tokens == 2
    assert [event.delta.text for event in found[2:4]] == ["RED ", "ENDS "]
    assert found[5].delta.stop_reason == "end_turn"
    assert found[5].usage.output_tokens == 2


def test_calls_are_blocks(client):
    whole = ask(client, "calls", tools=[LOOK])
    with client.messages.stream(
        model="scripted", max_tokens=9, messages=[{"role": "user", "content": "calls"}], tools=[LOOK]
    ) as stream:
        streamed = stream.get_final_message()

    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [(block.id, block.name, block.input) for block in whole.content[1:]] == [
        ("call_1", "look", {"at": "sea"}),
        ("call_2", "look", {}),
    ]
    assert [block.to_dict() for block in whole.content] == [
        {name: value for name, value in block.to_dict().items() if name != "parsed_output"}
        for block in streamed.content
    ]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_errors_are_anthropics(client):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as bad:
        ask(client, "a", max_tokens=0)
    assert bad.value.body["type"] == "error"
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, "a", model="claude-9")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as locked:
        client.with_options(api_key="wrong").messages.create(
            model="scripted", max_tokens=1, messages=[{"role": "user", "content": "a"}]
        )
    assert locked.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.InternalServerError, match="9 GB"):
        ask(client, "refused", stream=True)
    stream = ask(client, "breaks now", stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the device is gone"):
        list(stream)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, "does not think"),
        ("container", "c", "no code is run"),
        ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "send only `custom`"),
        ("tool_choice", {"type": "any"}, "none of the 0 `tools`"),
        ("tool_choice", {"type": "tool"}, "a name goes with"),
        ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}], "no document"),
        ("messages", [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}], "not a kind"),
        ("messages", [{"role": "user", "content": [CALL]}], "stands in"),
        ("messages", [{"role": "assistant", "content": "The answer is ("}], "is not continued"),
        ("messages", [], "length >= 1"),
        ("messages", [{"role": "user", "content": []}], "length >= 1"),
        ("stop_sequences", [""], "length >= 1"),
        ("temperature", 1.5, "<= 1.0"),
        ("stop", ["x"], "unknown field `stop`"),
        ("system", [{"type": "image", "source": BASE64}], "send only `text`"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(client, field, value, words):
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], field: value}
    answer = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", json=body, headers={"x-api-key": "sesame"})

    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["type"] == "error"


def test_fields_that_ask_for_nothing_are_taken(client):
    neutral = {
        "metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "stream": False,
        "stop_sequences": [], "tools": [], "tool_choice": {"type": "auto"}, "temperature": 1.0, "top_p": 0.9,
        "top_k": 5, "cache_control": {"type": "ephemeral"}, "output_config": {"effort": "high"},
    }  # fmt: skip
    assert ask(client, "red ends", extra_body=neutral).stop_reason == "end_turn"


def test_an_output_format_becomes_the_form_of_the_answer():
    from triptych.server.anthropic.messages import MessagesDialect

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    read = MessagesDialect().read
    form = read({**body, "output_config": {"format": {"type": "json_schema", "schema": schema}}}).form
    assert (form.kind, form.value) == ("schema", schema)
    chosen = read({**body, "tools": [LOOK], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}).form
    assert (chosen.kind, chosen.value, chosen.is_needed, chosen.is_single) == ("tools", None, True, True)


def test_arguments_that_were_cut_are_given_as_they_are():
    from triptych.server.anthropic.answers import _arguments

    assert _arguments('{"at": "s') == {"INVALID_JSON": '{"at": "s'}
    assert _arguments("[1]") == {"INVALID_JSON": "[1]"}


def test_events_carry_their_names(client):
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "red ends"}], "stream": True}
    text = httpx.post(
        f"{str(client.base_url).rstrip('/')}/v1/messages", json=body, headers={"x-api-key": "sesame"}
    ).text
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data[6:])['type']}"
