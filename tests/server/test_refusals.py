"""What a caller is told when a request cannot be served: a status, a name, numbers, a hint."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from asking import see, streamed
from scripted import ScriptedSession, serving
from triptych.errors import RequestError
from triptych.server.config import ServerConfig
from triptych.server.openai.chat import ChatDialect

USER = [{"role": "user", "content": "a b"}]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    config = ServerConfig(max_body_bytes=100_000, max_choices=8, body_s=0.5)
    with serving(ScriptedSession(), config) as url, httpx.Client(base_url=url) as client:
        yield client


def refused(http: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = http.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", "ten", "expected `int`, got `str`"),
        ("max_tokens", 1.5, "got `float`"),
        ("max_tokens", True, "got `bool`"),
        ("max_tokens", 0, ">= 1"),
        ("temperature", -0.1, ">= 0.0"),
        ("temperature", 2.5, "<= 2.0"),
        ("top_p", 0, "> 0.0"),
        ("top_k", -2, ">= -1"),
        ("min_p", 1.1, "<= 1.0"),
        ("n", 129, "<= 128"),
        ("n", 9, "the limit is 8"),
        ("stop", [str(number) for number in range(17)], "length <= 16"),
        ("stop", "", "length >= 1"),
        ("presence_penalty", 3, "<= 2.0"),
        ("logit_bias", {"7": 101}, "<= 100.0"),
        ("logit_bias", {"word": 1}, "expected `int`"),
        ("seed", 2**63, "<= "),
        ("top_logprobs", 2, "needs `logprobs: true`"),
        ("min_tokens", 999, "at most"),
        ("messages", [], "length >= 1"),
        ("messages", "hello", "expected `array`"),
        ("messages", [{"role": "user"}], "missing or empty"),
        ("messages", [{"role": "king", "content": "a"}], "king"),
        ("messages", [{"role": "tool", "content": "a"}], "`messages[0].tool_call_id` is required"),
        ("messages", [{"role": "user", "content": "a", "name": "bob"}], "no place in a message of role `user`"),
        ("messages", [{"content": "a"}], "required"),
        ("tools", [{"type": "function"}], "`tools[0].function` is required"),
        ("tool_choice", "required", "none of the 0 `tools`"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "required"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}], "expected `str"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "8k"}}]}],
         "8k"),
        ("stream_options", {"include_usage": True}, "only allowed with `stream: true`"),
        ("triptych", 0.5, "expected `object`"),
        ("triptych", {"keep_visual": 0}, "`triptych.keep_visual` is '0', which is no share"),
        ("triptych", {"keep_visual": 1.5}, "'1.5', which is no share: it must be above 0 and at most 1"),
        ("triptych", {"keep_visual": "half"}, "'half', which is no share"),
        ("triptych", {"keep_visual": True}, "'True', which is no share"),
        ("triptych", {"keep_visual": [0.5]}, "'[0.5]', which is no share"),
        ("triptych", {"kv_budget": -0.5}, "`triptych.kv_budget` is '-0.5'"),
        ("triptych", {"reduce": "magic"}, "choose one of cenprune"),
        ("triptych", {"reduce": ["grid"]}, "none of 6 methods"),
        ("triptych", {"keep_visuals": 0.5}, "did you mean `keep_visual`?"),
        ("triptych", {"zoom": 2}, "unknown field `triptych.zoom`"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_type_or_range_is_named(http, field, value, words):
    error = refused(http, "/v1/chat/completions", {"messages": USER, field: value})

    assert words in error["message"]
    assert error["param"].split("[")[0].split(".")[0] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_a_share_that_is_no_number_is_refused_before_a_stream_begins(http, path, value):
    body = f'{{"messages": {json.dumps(USER)}, "prompt": "a", "stream": true, "triptych": {{"keep_visual": {value}}}}}'
    if path == "/v1/completions":
        body = body.replace(f'"messages": {json.dumps(USER)}, ', "")
    else:
        body = body.replace('"prompt": "a", ', "")
    refused(http, path, body.encode())


@pytest.mark.parametrize(
    ("kind", "modality"),
    [("input_audio", "audio"), ("audio_url", "audio"), ("video_url", "video"), ("file", "file"), ("hologram", "kind")],
)
def test_a_part_of_another_modality_is_refused_by_its_name(http, kind, modality):
    parts = [{"type": "text", "text": "hear"}, {"type": kind, kind: {}}]
    error = refused(http, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})

    assert modality in error["message"]
    assert error["param"] == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("field", "asked", "neutral"),
    [
        ("best_of", 2, 1),
        ("modalities", ["text", "audio"], ["text"]),
        ("store", True, False),
        ("reasoning_effort", "high", None),
    ],
)
def test_a_field_that_is_not_served_is_refused_unless_it_asks_for_nothing(http, field, asked, neutral):
    error = refused(http, "/v1/chat/completions", {"messages": USER, field: asked})
    assert f"`{field}` is not served" in error["message"]
    assert "Hint: " in error["message"]
    assert error["param"] == field

    body = {"messages": USER, "max_tokens": 1, "user": "me", "metadata": {"a": "b"}, field: neutral}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_an_unknown_field_is_refused_with_the_closest_known_one(http):
    error = refused(http, "/v1/chat/completions", {"messages": USER, "max_token": 3})
    assert error["message"] == "unknown field `max_token`. Hint: did you mean `max_tokens`?"
    assert refused(http, "/v1/completions", {"prompt": "a", "sufix": 3})["param"] == "sufix"
    assert refused(http, "/v1/completions", {"prompt": [1, "a"]})["param"] == "prompt"
    assert refused(http, "/v1/completions", {"prompt": []})["param"] == "prompt"
    assert refused(http, "/v1/completions", {"max_tokens": 1})["param"] == "prompt"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"null", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 50_000, b'"text"', b"\x00"]
)
def test_a_body_that_is_no_json_object_is_refused(http, raw):
    assert "JSON" in refused(http, "/v1/chat/completions", raw)["message"]


def test_two_limits_that_disagree_are_refused(http):
    body = {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}
    assert "is 3 and" in refused(http, "/v1/chat/completions", body)["message"]
    body["max_tokens"] = 4
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [], "x" * 10**6: 1},
        {"messages": [{"role": "x" * 10**6, "content": "a"}]},
        {"messages": [{"role": "user", "content": "a", "x" * 10**6: 1}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "", "x" * 10**6: 1}}]}]},
        {"messages": USER, "logit_bias": {"x" * 10**6: 1}},
    ],
)
def test_a_refusal_repeats_little_of_what_was_sent(body):
    with pytest.raises(RequestError) as told:
        ChatDialect().read(body)
    assert len(str(told.value)) + len(told.value.param or "") < 1000


def test_too_many_parts_of_content_are_refused_however_they_are_spread():
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 100}
    with pytest.raises(RequestError, match="more than 16,384 parts of content"):
        ChatDialect().read({"messages": [message] * 164})


def test_paths_and_methods_are_refused_in_the_same_form(http):
    assert "/openapi.json lists what is" in refused(http, "/v1/audio/speech", {}, 404)["message"]
    answer = http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert "use POST" in answer.json()["error"]["message"]


def test_no_path_leads_to_another_server_or_scheme():
    """A redirect would name http, also behind a proxy that speaks https: with the next request its key is shown."""
    with serving(ScriptedSession()) as url:
        for path in ("/health/", "/v1/chat/completions/"):
            answer = httpx.post(url + path, json={}, headers={"host": "evil.test"})
            assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_a_body_over_the_limit_is_refused_before_it_was_read(http):
    big = {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
    error = refused(http, "/v1/chat/completions", big, 413)
    assert "the limit is 100,000" in error["message"]

    def endless() -> Iterator[bytes]:
        for _ in range(400):
            yield b"x" * 10_000

    answer = http.post("/v1/chat/completions", content=endless())
    assert answer.status_code == 413
    assert http.get("/health").status_code == 200


def test_a_declared_length_over_the_limit_is_answered_at_once(http):
    with socket.create_connection((http.base_url.host, http.base_url.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n")
        raw.settimeout(3)
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_arrives_is_given_up(http):
    with socket.create_connection((http.base_url.host, http.base_url.port)) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        raw.settimeout(5)
        assert raw.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_full_queue_says_when_to_come_back():
    with serving(ScriptedSession(max_queued=0)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": USER})

    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_all_of_n_answers_start_or_none():
    session = ScriptedSession(max_queued=3)
    with serving(session) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": USER, "n": 4}).status_code == 429

    assert len(session.streams) == 3
    assert all(stream.is_aborted for stream in session.streams.values())


def test_a_prompt_refused_for_a_stream_is_refused_before_the_stream(http):
    content = [{"type": "image_url", "image_url": "data:image/png;base64,broken"}, {"type": "text", "text": "a"}]
    body = {"messages": [{"role": "user", "content": content}], "stream": True}
    error = refused(http, "/v1/chat/completions", body)
    assert error["code"] == "invalid_media"
    error = refused(
        http, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 2000}], "stream": True}
    )
    assert error["code"] == "context_length_exceeded"
    assert "2000" in error["message"]


def test_an_error_nobody_foresaw_tells_nothing_of_our_insides():
    def fails() -> None:
        raise ZeroDivisionError("secret path")

    with serving(ScriptedSession(while_preparing=fails)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": USER})

    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


def test_bad_requests_are_refused_while_streams_stand_and_do_not_touch_them():
    import asyncio

    async def story(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def bother(body: Any) -> None:
                answer = await client.post("/v1/chat/completions", content=body)
                assert 400 <= answer.status_code < 500

            asked = [{"messages": see(f"slow w{number}"), "max_tokens": 20} for number in range(8)]
            streams = [asyncio.create_task(streamed(client, body)) for body in asked]
            while len(session.streams) < 8:
                await asyncio.sleep(0.01)
            session.is_held = True
            image = {"type": "image_url", "image_url": "data:image/png;base64,broken"}
            bad = [
                b"{",
                json.dumps({"messages": [{"role": "user", "content": [image]}]}),
                json.dumps({"messages": [{"role": "user", "content": "a " * 3000}]}),
                json.dumps({"messages": USER, "n": "two"}),
            ]
            await asyncio.gather(*(bother(body) for body in bad * 5))
            assert not any(task.done() for task in streams)
            session.is_held = False
            return await asyncio.gather(*streams)

    session = ScriptedSession()
    with serving(session) as url:
        answers = asyncio.run(story(url))

    assert answers == [f"SLOW W{number} " * 10 for number in range(8)]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_value"),
        ("POST", "/v1/media/inspect", b"{", 400, "invalid_value"),
        ("POST", "/tokenize", b"[]", 400, "invalid_value"),
        ("GET", "/v1/models/none", b"", 404, "model_not_found"),
        ("GET", "/nowhere", b"", 404, ""),
        ("PUT", "/health", b"", 405, ""),
    ],
)
def test_every_refusal_is_counted_once_whoever_refuses(method, path, body, status, code):
    with serving(ScriptedSession()) as url:
        assert httpx.request(method, url + path, content=body).status_code == status
        told = httpx.get(f"{url}/metrics").text

    counts = re.findall(r'^triptych:refused_requests_total\{code="(\w*)",.*status="(\d+)"\} (\S+)$', told, re.MULTILINE)
    assert counts == [(code, str(status), "1.0")]


def test_an_error_in_the_midst_of_a_stream_is_counted_by_its_own_status():
    body = {"messages": [{"role": "user", "content": "a breaks"}], "stream": True}
    with serving(ScriptedSession()) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        told = httpx.get(f"{url}/metrics").text

    assert 'triptych:refused_requests_total{code="internal_error",model_name="scripted",status="500"} 1.0' in told
    assert 'vllm:request_success_total{finished_reason="error",model_name="scripted"} 1.0' in told
    assert 'vllm:request_success_total{finished_reason="abort",model_name="scripted"} 0.0' in told
