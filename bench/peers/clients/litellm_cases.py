"""LiteLLM as a library, by OpenAI's and by Anthropic's API, and instructor on top of the `openai` client."""

from __future__ import annotations

import json
from typing import Any, Literal

import instructor
import litellm
import openai
from peers.clients.case import WEATHER, Server, picture_uri
from pydantic import BaseModel

TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


def ask(server: Server, text: Any = "Hello", **how: Any) -> Any:
    return litellm.completion(
        model=f"openai/{server.model}", api_base=server.v1, api_key=server.key, max_tokens=200, num_retries=0,
        messages=[{"role": "user", "content": text}], **how,
    )  # fmt: skip


def completes(server: Server) -> None:
    answer = ask(server, user="somebody", metadata={"trace": "1"})
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens > 0


def streams(server: Server) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert litellm.stream_chunk_builder(chunks).usage.total_tokens > 0  # type: ignore[union-attr]


def sees_a_picture(server: Server) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": picture_uri()}]
    assert ask(server, parts).choices[0].message.content


def calls_a_tool(server: Server) -> None:
    call = ask(server, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
    Weather.model_validate_json(call.function.arguments)


def keeps_to_a_schema(server: Server) -> None:
    Weather.model_validate_json(ask(server, response_format=Weather).choices[0].message.content)


def completes_text(server: Server) -> None:
    answer: Any = litellm.text_completion(
        model=f"text-completion-openai/{server.model}", api_base=server.v1, api_key=server.key, prompt="One, two,",
        max_tokens=4,
    )  # fmt: skip
    assert answer.choices[0].text


def speaks_anthropic(server: Server) -> None:
    answer: Any = litellm.completion(
        model=f"anthropic/{server.model}", api_base=server.url, api_key=server.key, max_tokens=200, tools=[TOOL],
        messages=[{"role": "user", "content": "Weather?"}], tool_choice="required",
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")


def uses_the_responses_api(server: Server) -> None:
    answer: Any = litellm.responses(
        model=f"openai/{server.model}", api_base=server.v1, api_key=server.key, input="Hello", max_output_tokens=16,
        store=False,
    )  # fmt: skip
    assert answer.output[0].content[0].text


def instructs_by_tools(server: Server) -> None:
    made = _instructor(server, instructor.Mode.TOOLS)
    assert isinstance(made, Weather)


def instructs_by_schema(server: Server) -> None:
    assert isinstance(_instructor(server, instructor.Mode.JSON_SCHEMA), Weather)


def instructs_by_strict_tools(server: Server) -> None:
    assert isinstance(_instructor(server, instructor.Mode.TOOLS_STRICT), Weather)


def _instructor(server: Server, mode: instructor.Mode) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=server.model, response_model=Weather, messages=[{"role": "user", "content": "Weather?"}], max_tokens=200,
        max_retries=0,
    )  # fmt: skip


CASES = (
    completes, streams, sees_a_picture, calls_a_tool, keeps_to_a_schema, completes_text, speaks_anthropic,
    uses_the_responses_api, instructs_by_tools, instructs_by_schema, instructs_by_strict_tools,
)  # fmt: skip
