"""The official `openai` client: chat, streams, tools, schemas, pictures, responses, text, errors."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any, Literal

import openai
from peers.clients.case import WEATHER, Server, picture_uri
from pydantic import BaseModel

TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


@functools.cache
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0, timeout=600)


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


def lists_models(server: Server) -> None:
    assert server.model in [model.id for model in client(server).models.list()]
    assert client(server).models.retrieve(server.model).id == server.model


def answers_whole(server: Server) -> None:
    answer = client(server).chat.completions.create(model=server.model, messages=say("Hello"), max_tokens=6)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def streams_what_it_answers_whole(server: Server) -> None:
    how: Any = {"model": server.model, "messages": say("Name a river."), "max_tokens": 12, "temperature": 0}
    whole = client(server).chat.completions.create(**how).choices[0].message.content
    chunks = list(client(server).chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole, (text, whole)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")


def streams_by_the_helper(server: Server) -> None:
    with client(server).chat.completions.stream(model=server.model, messages=say("Hi"), max_tokens=6) as stream:
        kinds = [event.type for event in stream]
        whole = stream.current_completion_snapshot  # the final one is refused by the client where tokens ran out
    assert "content.delta" in kinds
    assert whole.choices[0].message.content


def answers_n_choices_with_seeds(server: Server) -> None:
    def ask() -> list[str | None]:
        answer = client(server).chat.completions.create(
            model=server.model, messages=say("Say a word."), n=2, seed=5, temperature=1.0, max_tokens=5
        )
        return [choice.message.content for choice in answer.choices]

    assert len(ask()) == 2
    assert ask() == ask()


def stops_at_a_string(server: Server) -> None:
    whole = client(server).chat.completions.create(
        model=server.model, messages=say("Count."), max_tokens=16, temperature=0
    )
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:2]
    cut = client(server).chat.completions.create(
        model=server.model, messages=say("Count."), max_tokens=16, temperature=0, stop=[stop]
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def tells_logprobs(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=say("Hi"), max_tokens=3, logprobs=True, top_logprobs=4, temperature=0
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == 3
    assert all(len(one.top_logprobs) == 4 and one.logprob <= 0 for one in content)
    assert all(one.logprob == max(other.logprob for other in one.top_logprobs) for one in content)


def moves_tokens_by_logit_bias(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=say("Hi"), max_tokens=4, logit_bias={"300": 100}, temperature=0, logprobs=True
    )
    assert answer.choices[0].logprobs is not None
    assert len({one.token for one in answer.choices[0].logprobs.content or []}) == 1


def sees_a_picture(server: Server) -> None:
    def ask(brightness: int) -> openai.types.CompletionUsage | None:
        content: Any = [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": picture_uri(brightness), "detail": "low"}},
        ]
        messages: Any = [{"role": "user", "content": content}]
        return client(server).chat.completions.create(model=server.model, messages=messages, max_tokens=4).usage

    usage: Any = ask(10)
    assert usage.prompt_tokens_details.image_tokens > 0


def calls_a_tool(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model,
        messages=say("Weather in Paris?"),
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    )
    choice = answer.choices[0]
    calls: Any = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls", choice.finish_reason
    assert calls[0].id
    assert calls[0].function.name == "weather"
    Weather.model_validate_json(calls[0].function.arguments)


def calls_the_tool_it_is_told_to(server: Server) -> None:
    other: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    answer = client(server).chat.completions.create(
        model=server.model, messages=say("Weather?"), tools=[other, TOOL], max_tokens=300,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )  # fmt: skip
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather"]
    Weather.model_validate_json(calls[0].function.arguments)


def streams_a_tool_call(server: Server) -> None:
    stream = client(server).chat.completions.create(
        model=server.model,
        messages=say("Weather?"),
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        stream=True,
    )
    name, arguments, identity, finish = "", "", None, None
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            assert call.function is not None
            identity = identity or call.id
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish if chunk.choices else finish
    assert (name, finish) == ("weather", "tool_calls"), (name, finish)
    assert identity
    Weather.model_validate_json(arguments)


def leaves_tools_alone_when_told(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=say("Hi"), tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert not answer.choices[0].message.tool_calls
    free = client(server).chat.completions.create(model=server.model, messages=say("Hi"), tools=[TOOL], max_tokens=8)
    assert free.choices[0].finish_reason in ("stop", "length", "tool_calls")


def takes_a_tools_result(server: Server) -> None:
    first = client(server).chat.completions.create(
        model=server.model,
        messages=say("Weather?"),
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    )
    message: Any = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains."}
    second = client(server).chat.completions.create(
        model=server.model, messages=[*say("Weather?"), message, result], tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert second.choices[0].message.content


def parses_into_a_model(server: Server) -> None:
    answer = client(server).chat.completions.parse(
        model=server.model, messages=say("Weather in Rome?"), response_format=Weather, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)
    assert answer.choices[0].finish_reason == "stop"


def parses_a_strict_tool_call(server: Server) -> None:
    answer = client(server).chat.completions.parse(
        model=server.model,
        messages=say("Weather?"),
        tools=[STRICT],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.parsed_arguments["city"] in ("Paris", "Rome")


def answers_a_json_object(server: Server) -> None:
    """The schema is free, so a model may go on until its tokens end: a small one is told where."""
    answer = client(server).chat.completions.create(
        model=server.model, messages=say('Answer {"a": 1}.'), response_format={"type": "json_object"}, max_tokens=200,
        temperature=0,
    )  # fmt: skip
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    else:
        assert (answer.choices[0].message.content or "").lstrip().startswith("{")


def completes_a_text(server: Server) -> None:
    answer = client(server).completions.create(
        model=server.model, prompt=["One, two,", "Red, green,"], max_tokens=4, logprobs=2, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("One, two,")
    stream = client(server).completions.create(model=server.model, prompt="One, two,", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def responds(server: Server) -> None:
    answer = client(server).responses.create(
        model=server.model, instructions="Be brief.", input="Hello", max_output_tokens=16, store=False
    )
    assert answer.id.startswith("resp_")
    assert answer.output_text
    assert answer.usage is not None
    assert answer.status in ("completed", "incomplete")


def streams_a_response(server: Server) -> None:
    content: Any = [
        {"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": picture_uri()},
    ]  # fmt: skip
    stream = client(server).responses.create(
        model=server.model, input=[{"role": "user", "content": content}], max_output_tokens=16, stream=True, store=False
    )
    events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text


def responds_with_a_tool_call(server: Server) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    first = client(server).responses.create(
        model=server.model,
        input="Weather?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        store=False,
    )
    call: Any = next(item for item in first.output if item.type == "function_call")
    Weather.model_validate_json(call.arguments)
    items: Any = [
        {"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."},
    ]  # fmt: skip
    second = client(server).responses.create(model=server.model, input=items, max_output_tokens=16, store=False)
    assert second.output_text


def responds_into_a_model(server: Server) -> None:
    answer = client(server).responses.parse(
        model=server.model, input="Weather in Rome?", text_format=Weather, max_output_tokens=300, store=False
    )
    assert isinstance(answer.output_parsed, Weather)


def refuses_in_its_own_words(server: Server) -> None:
    def refused(kind: type[openai.APIStatusError], **how: Any) -> Any:
        try:
            client(server).chat.completions.create(**{"model": server.model, "messages": say("a"), **how})
        except kind as error:
            return error
        raise AssertionError(f"{how} was not refused")

    assert refused(openai.BadRequestError, temperature=9).param == "temperature"
    assert refused(openai.NotFoundError, model="no-such-model").code == "model_not_found"
    assert refused(openai.BadRequestError, max_tokens=10**9).code == "context_length_exceeded"
    refused(openai.BadRequestError, extra_body={"no_such_field": 1})
    refused(openai.BadRequestError, extra_body={"structured_outputs": {"regex": "("}})


def embeds_or_says_why_not(server: Server) -> None:
    try:
        answer = client(server).embeddings.create(model=server.model, input="Hello")
    except (openai.BadRequestError, openai.NotFoundError) as error:
        if "embedding" not in str(error):
            raise
    else:
        assert len(answer.data[0].embedding) > 1


def answers_many_at_once(server: Server) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0) as many:
            asked = [
                many.chat.completions.create(model=server.model, messages=say(f"{n}"), max_tokens=3) for n in range(6)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    assert len(asyncio.run(ask())) == 6


CASES = (
    lists_models, answers_whole, streams_what_it_answers_whole, streams_by_the_helper, answers_n_choices_with_seeds,
    stops_at_a_string, tells_logprobs, moves_tokens_by_logit_bias, sees_a_picture, calls_a_tool,
    calls_the_tool_it_is_told_to, streams_a_tool_call, leaves_tools_alone_when_told, takes_a_tools_result,
    parses_into_a_model, parses_a_strict_tool_call, answers_a_json_object, completes_a_text, responds,
    streams_a_response, responds_with_a_tool_call, responds_into_a_model, refuses_in_its_own_words,
    embeds_or_says_why_not, answers_many_at_once,
)  # fmt: skip
