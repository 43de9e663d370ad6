"""Bodies as Open WebUI and the like send them: bare-string pictures, many settings, headers of their own."""

from __future__ import annotations

import json
from typing import Any

import httpx
from peers.clients.case import WEATHER, Server, picture_uri

HEADERS = {
    "Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Id": "1",
    "X-OpenWebUI-User-Email": "ada@example.org", "X-OpenWebUI-User-Role": "user", "X-OpenWebUI-Chat-Id": "2",
    "HTTP-Referer": "https://openwebui.com/", "X-Title": "Open WebUI",
}  # fmt: skip


def post(server: Server, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(server.url + path, json={"model": server.model, **body}, headers=HEADERS, timeout=600)


def lists_models(server: Server) -> None:
    answer = httpx.get(f"{server.v1}/models", headers=HEADERS)
    assert answer.json()["data"][0]["id"] == server.model


def streams_a_chat(server: Server) -> None:
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hello"}]
    answer = post(
        server, {"stream": True, "messages": messages, "stream_options": {"include_usage": True}, "max_tokens": 8}
    )
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["usage"]["total_tokens"] > 0


def sends_a_picture_as_a_bare_string(server: Server) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": picture_uri()}]
    answer = post(server, {"stream": False, "messages": [{"role": "user", "content": parts}], "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0


def asks_for_a_title(server: Server) -> None:
    task = 'Create a concise title. Answer as JSON: {"title": …}\n<chat_history>\nUSER: Hi\n</chat_history>'
    body = {"stream": False, "messages": [{"role": "user", "content": task}], "max_completion_tokens": 16}
    assert post(server, body).status_code == 200


def sends_an_earlier_answer_with_nothing_in_it(server: Server) -> None:
    texts = (("user", "Hello"), ("assistant", ""), ("user", "Well?"))
    messages = [{"role": role, "content": text} for role, text in texts]
    assert post(server, {"messages": messages, "max_tokens": 4}).status_code == 200


def sends_all_its_settings(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0.7, "top_p": 0.9,
        "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.05,
        "seed": 7, "stop": ["###"], "logit_bias": {"300": 1}, "user": "ada", "n": 1, "metadata": {"chat_id": "2"},
    }  # fmt: skip
    answer = post(server, body)
    assert answer.status_code == 200, answer.text


def calls_a_tool_and_sends_it_back(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [tool], "tool_choice": "required"}
    first = post(server, {**body, "max_tokens": 200})
    assert first.status_code == 200, first.text
    message = first.json()["choices"][0]["message"]
    call = message["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "It rains."}]}
    again = {**body, "messages": [*body["messages"], message, result], "tool_choice": "none", "max_tokens": 8}
    assert post(server, again).status_code == 200, post(server, again).text


def is_told_why_not(server: Server) -> None:
    parts = [{"type": "image_url", "image_url": "http://example.org/a.png"}, {"type": "text", "text": "What is this?"}]
    answer = post(server, {"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert "allowed-media-domains" in answer.json()["error"]["message"]


CASES = (
    lists_models, streams_a_chat, sends_a_picture_as_a_bare_string, asks_for_a_title,
    sends_an_earlier_answer_with_nothing_in_it, sends_all_its_settings, calls_a_tool_and_sends_it_back, is_told_why_not,
)  # fmt: skip
