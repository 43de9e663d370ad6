"""LlamaIndex's `OpenAILike`; annotations are not put off here, because it reads those of functions."""

import asyncio
from typing import Any, Literal

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from peers.clients.case import Server, png
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def llm(server: Server, **how: Any) -> OpenAILike:
    return OpenAILike(
        model=server.model, api_base=server.v1, api_key=server.key, is_chat_model=True, max_tokens=200, max_retries=0,
        timeout=600, is_function_calling_model=True, **how,
    )  # fmt: skip


def completes(server: Server) -> None:
    assert llm(server).complete("Hello").text
    assert "".join(piece.delta or "" for piece in llm(server).stream_complete("Hello"))


def completes_without_chat(server: Server) -> None:
    plain = OpenAILike(model=server.model, api_base=server.v1, api_key=server.key, max_tokens=8, max_retries=0)
    assert plain.complete("One, two,").text
    assert "".join(piece.delta or "" for piece in plain.stream_complete("One, two,"))


def chats(server: Server) -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]
    assert llm(server).chat(messages).message.content
    assert "".join(piece.delta or "" for piece in llm(server).stream_chat(messages))
    assert asyncio.run(llm(server).achat(messages)).message.content


def sees_a_picture(server: Server) -> None:
    blocks: Any = [ImageBlock(image=png(), image_mimetype="image/png"), TextBlock(text="What is this?")]
    assert llm(server).chat([ChatMessage(role="user", blocks=blocks)]).message.content


def calls_a_function(server: Server) -> None:
    made = FunctionTool.from_defaults(weather)
    answer = llm(server).chat_with_tools([made], user_msg="Weather?", tool_required=True)
    call = llm(server).get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "weather"
    assert call.tool_kwargs["city"] in ("Paris", "Rome")


def calls_and_answers(server: Server) -> None:
    made = FunctionTool.from_defaults(weather)
    answer = llm(server).predict_and_call([made], user_msg="Weather?", tool_required=True, error_on_no_tool_call=True)
    assert "It rains in" in str(answer)


def streams_a_function_call(server: Server) -> None:
    made = FunctionTool.from_defaults(weather)
    pieces = list(llm(server).stream_chat_with_tools([made], user_msg="Weather?", tool_required=True))
    call = llm(server).get_tool_calls_from_response(pieces[-1])[0]
    assert call.tool_kwargs["city"] in ("Paris", "Rome")


def predicts_structured(server: Server) -> None:
    made = llm(server, tool_choice="required").as_structured_llm(Weather).complete("Weather in Rome?")
    assert isinstance(made.raw, Weather)


def predicts_by_schema(server: Server) -> None:
    made = llm(server, should_use_structured_outputs=True).as_structured_llm(Weather).complete("Weather in Rome?")
    assert isinstance(made.raw, Weather)


CASES = (
    completes, completes_without_chat, chats, sees_a_picture, calls_a_function, calls_and_answers,
    streams_a_function_call, predicts_structured, predicts_by_schema,
)  # fmt: skip
