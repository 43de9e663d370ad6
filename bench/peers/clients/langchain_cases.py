"""LangChain's chat classes for OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from peers.clients.case import Server, picture_uri
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"] = Field(description="Which city")
    unit: Literal["celsius", "fahrenheit"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def chat(server: Server, **how: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=server.v1, api_key=server.key, model=server.model, max_retries=0, max_tokens=200, **how)  # type: ignore[arg-type]


def invokes(server: Server) -> None:
    answer = chat(server, temperature=0).invoke([SystemMessage("Be brief."), HumanMessage("Hello")])
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def streams(server: Server) -> None:
    whole: AIMessageChunk | None = None
    for chunk in chat(server, stream_usage=True).stream("Hello"):
        whole = chunk if whole is None else whole + chunk  # type: ignore[assignment]
    assert whole is not None
    assert whole.content
    assert whole.usage_metadata is not None


def runs_batches_and_async(server: Server) -> None:
    assert len(chat(server).batch(["One", "Two", "Three"])) == 3
    assert asyncio.run(chat(server).ainvoke("Hello")).content


def sees_pictures(server: Server) -> None:
    old = {"type": "image_url", "image_url": {"url": picture_uri()}}
    new = {"type": "image", "base64": picture_uri().partition(",")[2], "mime_type": "image/png"}
    for part in (old, new):
        message = HumanMessage(content=[{"type": "text", "text": "What is this?"}, part])
        assert chat(server).invoke([message]).content


def binds_tools(server: Server) -> None:
    answer = chat(server).bind_tools([weather], tool_choice="required").invoke("Weather in Paris?")
    call = answer.tool_calls[0]
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    last = chat(server).bind_tools([weather], tool_choice="none").invoke(["Weather in Paris?", answer, result])
    assert last.content


def binds_tools_freely(server: Server) -> None:
    answer = chat(server).bind_tools([weather]).invoke("Weather in Paris?")
    assert answer.content or answer.tool_calls


def streams_tool_calls(server: Server) -> None:
    whole: Any = None
    for chunk in chat(server).bind_tools([weather], tool_choice="weather").stream("Weather?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


def writes_structured_output_by_schema(server: Server) -> None:
    made = chat(server).with_structured_output(Weather, method="json_schema").invoke("Weather in Rome?")
    assert isinstance(made, Weather)
    strict = chat(server).with_structured_output(Weather, method="json_schema", strict=True).invoke("Weather in Rome?")
    assert isinstance(strict, Weather)


def writes_structured_output_by_a_function(server: Server) -> None:
    made = chat(server).with_structured_output(Weather, method="function_calling").invoke("Weather in Rome?")
    assert isinstance(made, Weather)
    whole: Any = chat(server).with_structured_output(Weather, method="function_calling", include_raw=True).invoke("?")
    assert isinstance(whole["parsed"], Weather)


def asks_for_a_json_object(server: Server) -> None:
    answer = chat(server).bind(response_format={"type": "json_object"}).invoke("Answer in JSON.")
    assert str(answer.content).lstrip().startswith("{")


def asks_for_logprobs_and_stops(server: Server) -> None:
    answer = chat(server).bind(logprobs=True, top_logprobs=2, stop=["never"]).invoke("Hello")
    assert answer.response_metadata["logprobs"]["content"]


def uses_the_responses_api(server: Server) -> None:
    assert chat(server, use_responses_api=True, store=False).invoke("Hello").text
    pieces = list(chat(server, use_responses_api=True, store=False).stream("Hello"))
    assert any(piece.text for piece in pieces)


def completes_text(server: Server) -> None:
    llm = OpenAI(base_url=server.v1, api_key=server.key, model=server.model, max_tokens=4, max_retries=0)  # type: ignore[arg-type]
    assert llm.invoke("One, two,")


def speaks_anthropic(server: Server) -> None:
    llm: Any = ChatAnthropic(
        base_url=server.url, api_key=server.key, model_name=server.model, max_tokens_to_sample=200, max_retries=0
    )  # type: ignore[call-arg, arg-type]
    assert llm.invoke("Hello").content
    assert any(chunk.content for chunk in llm.stream("Hello"))
    call = llm.bind_tools([weather], tool_choice="any").invoke("Weather?").tool_calls[0]
    assert call["args"]["city"] in ("Paris", "Rome")
    assert isinstance(llm.with_structured_output(Weather).invoke("Weather?"), Weather)


CASES = (
    invokes, streams, runs_batches_and_async, sees_pictures, binds_tools, binds_tools_freely, streams_tool_calls,
    writes_structured_output_by_schema, writes_structured_output_by_a_function, asks_for_a_json_object,
    asks_for_logprobs_and_stops, uses_the_responses_api, completes_text, speaks_anthropic,
)  # fmt: skip
