"""The official `anthropic` client: messages, streams, tools, pictures, counting, errors."""

from __future__ import annotations

import functools
from typing import Any

import anthropic
from peers.clients.case import WEATHER, Server, picture_base64

TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}
GREEDY = {"temperature": 0}  # its newest versions know no temperature by name


@functools.cache
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=600)


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


def picture_message(text: str) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": picture_base64()}
    return [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text}]}]


def answers_whole(server: Server) -> None:
    answer = client(server).messages.create(
        model=server.model,
        max_tokens=6,
        system="Be brief.",
        messages=say("Hello"),
        extra_body={"temperature": 0.5, "top_k": 20, "metadata": {"user_id": "ada"}},
    )
    assert (answer.type, answer.role) == ("message", "assistant")
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 0


def streams_what_it_answers_whole(server: Server) -> None:
    how: Any = {"model": server.model, "max_tokens": 12, "messages": say("Name a river."), "extra_body": GREEDY}
    whole: Any = client(server).messages.create(**how)
    with client(server).messages.stream(**how) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def streams_events_in_order(server: Server) -> None:
    events = client(server).messages.create(model=server.model, max_tokens=6, messages=say("Hi"), stream=True)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.index("content_block_start") < kinds.index("content_block_delta") < kinds.index("content_block_stop")


def sees_a_picture(server: Server) -> None:
    plain = client(server).messages.create(model=server.model, max_tokens=4, messages=say("What is this?"))
    seen = client(server).messages.create(model=server.model, max_tokens=4, messages=picture_message("What is this?"))
    assert seen.usage.input_tokens > plain.usage.input_tokens


def calls_a_tool(server: Server) -> None:
    answer = client(server).messages.create(
        model=server.model, max_tokens=300, messages=say("Weather?"), tools=[TOOL], tool_choice=ONE
    )
    call: Any = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use"
    assert call.name == "weather"
    assert call.input["city"] in ("Paris", "Rome")


def streams_a_tool_call(server: Server) -> None:
    with client(server).messages.stream(
        model=server.model, max_tokens=300, messages=say("Weather?"), tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    ) as stream:  # fmt: skip
        final = stream.get_final_message()
    call: Any = next(block for block in final.content if block.type == "tool_use")
    assert call.input["unit"] in ("celsius", "fahrenheit")
    assert final.stop_reason == "tool_use"


def takes_a_tools_result(server: Server) -> None:
    first = client(server).messages.create(
        model=server.model, max_tokens=300, messages=say("Weather?"), tools=[TOOL], tool_choice=ONE
    )
    call: Any = next(block for block in first.content if block.type == "tool_use")
    source = {"type": "base64", "media_type": "image/png", "data": picture_base64()}
    content = [{"type": "text", "text": "See for yourself:"}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
    messages: Any = [
        *say("Weather?"), {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    second: Any = client(server).messages.create(
        model=server.model, max_tokens=8, messages=messages, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert second.content[0].text


def stops_at_a_sequence(server: Server) -> None:
    how: Any = {"model": server.model, "max_tokens": 16, "messages": say("Count."), "extra_body": GREEDY}
    whole: Any = client(server).messages.create(**how)
    text = whole.content[0].text
    stop = text[len(text) // 2 :][:2]
    cut: Any = client(server).messages.create(**how, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


def counts_tokens(server: Server) -> None:
    counted = client(server).messages.count_tokens(model=server.model, messages=picture_message("Hi"), system="Brief.")
    asked = client(server).messages.create(
        model=server.model, max_tokens=1, messages=picture_message("Hi"), system="Brief."
    )
    cached = asked.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == asked.usage.input_tokens + cached


def refuses_in_its_own_words(server: Server) -> None:
    def refused(kind: type[anthropic.APIStatusError], **how: Any) -> None:
        try:
            client(server).messages.create(**{"model": server.model, "max_tokens": 4, "messages": say("a"), **how})
        except kind as error:
            body: Any = error.body
            assert body["type"] == "error", body
            assert body["error"]["message"], body
            return
        raise AssertionError(f"{how} was not refused")

    refused(anthropic.BadRequestError, extra_body={"temperature": 9})
    refused(anthropic.NotFoundError, model="no-such-model")
    refused(anthropic.BadRequestError, messages=[])
    refused(anthropic.BadRequestError, extra_body={"no_such_field": 1})


CASES = (
    answers_whole, streams_what_it_answers_whole, streams_events_in_order, sees_a_picture, calls_a_tool,
    streams_a_tool_call, takes_a_tools_result, stops_at_a_sequence, counts_tokens, refuses_in_its_own_words,
)  # fmt: skip
