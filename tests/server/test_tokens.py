"""Counting, spelling and prompts' probabilities, over a model that answers by arithmetic."""

from __future__ import annotations

import json
import math
import pydoc
import threading
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from asking import png
from conforming import dial, read_all
from scripted import serving
from triptych.testing import ROWS_PER_TILE, VOCAB, tiny_session

PICTURE = {"type": "image_url", "image_url": png(200)}
SEEN = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "hi"}]}]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with tiny_session() as session, serving(session) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_a_text_is_tokenized_and_spelled_again(http):
    body = {"prompt": "añ <|im_end|>", "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()

    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == len("añ <|im_end|>".encode())
    assert answer["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "añ <|im_end|>"}
    assert http.post("/tokenize", json={"prompt": "a" * 2000}).json()["count"] == 2000


def test_a_chat_is_tokenized_with_its_pictures(http):
    answer = http.post("/tokenize", json={"messages": SEEN}).json()
    used = http.post("/v1/chat/completions", json={"messages": SEEN, "max_tokens": 1}).json()["usage"]

    assert answer["count"] == used["prompt_tokens"]
    assert answer["token_strs"] is None
    assert answer["tokens"].count(VOCAB) == ROWS_PER_TILE


def test_messages_are_counted_as_they_are_billed(http):
    client = anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": png(200).partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "hi"}]}]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system="be brief")
    used = client.messages.create(model="tiny", messages=messages, system="be brief", max_tokens=1).usage

    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    source["data"] = "AAAA"
    with pytest.raises(anthropic.BadRequestError, match="no picture format"):
        client.messages.count_tokens(model="tiny", messages=messages)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"promt": "a"}, "did you mean `prompt`?"),
        ("/tokenize", {"messages": SEEN, "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {}, "`prompt` is required"),
        ("/tokenize", {"prompt": "a" * (1 << 20) + "a"}, "length <= 1048576"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "not served"),
        ("/detokenize", {"tokens": [5000]}, "token 5000"),
        ("/detokenize", {"tokens": [-1]}, ">= 0"),
        ("/detokenize", {"tokens": [1], "model": "gpt-9"}, "not served"),
        ("/v1/embeddings", {"input": "a", "model": "tiny"}, "makes no embeddings"),
    ],
)
def test_what_cannot_be_counted_is_refused(http, path, body, words):
    answer = http.post(path, json=body)
    assert 400 <= answer.status_code < 500
    assert words in answer.json()["error"]["message"]


def test_props_tell_what_the_server_can_do(http):
    props = http.get("/props").json()

    assert props["modalities"] == {"vision": True, "audio": False}
    assert props["placements"] == {"decoder": "arithmetic"} | props["placements"]
    assert props["limits"]["max_model_len"] == 512
    assert props["reduction"] == {"method": "cenprune", "keep": 1.0, "min_keep": 0.0}
    assert props["caches"]["share_prefixes"]


def test_an_echo_has_its_prompts_probabilities(http):
    """What evaluations ask for: null for the first token, and offsets into the whole text."""
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    choice = client.completions.create(**asked).choices[0]
    logprobs = choice.logprobs

    assert logprobs.tokens[:5] == list("hello")
    assert len(logprobs.tokens) == 7
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(math.isfinite(one) for one in logprobs.token_logprobs[1:])
    assert all(max(top.values()) <= 0 for top in logprobs.top_logprobs[1:])
    assert logprobs.text_offset[:6] == [0, 1, 2, 3, 4, 5]
    streamed = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    parts = [one.logprobs for one in streamed if one.logprobs]
    assert "".join(one.text for one in streamed) == choice.text
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset] == logprobs.text_offset
    assert [value for part in parts for value in part.token_logprobs] == logprobs.token_logprobs


def test_prompt_logprobs_are_null_at_media(http):
    body = {"messages": SEEN, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body).json()
    given = answer["prompt_logprobs"]
    tokens = http.post("/tokenize", json={"messages": SEEN}).json()["tokens"]

    assert len(given) == answer["usage"]["prompt_tokens"]
    assert [one is None for one in given] == [at == 0 or token == VOCAB for at, token in enumerate(tokens)]
    last = given[-1]
    assert set(last[str(tokens[-1])]) == {"logprob", "rank", "decoded_token"}
    assert sorted(one["rank"] for one in last.values() if one["rank"]) == [1, 2]
    for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        assert http.post("/v1/chat/completions", json=body | wrong).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/v1/media/inspect", "/v1/messages/count_tokens"])
def test_a_caller_who_hangs_up_in_the_midst_of_a_body_is_no_fault_of_ours(http, path):
    with dial(str(http.base_url)) as leaving:
        leaving.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert http.get("/health").status_code == 200
    assert 'status="500"' not in http.get("/metrics").text


@pytest.mark.parametrize("path", ["/tokenize", "/v1/media/inspect", "/v1/messages/count_tokens", "/v1/responses"])
def test_a_body_that_is_refused_early_is_told_so_before_its_connection_ends(http, path):
    with dial(str(http.base_url)) as large:
        large.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode())
        large.sendall(b"x" * (1 << 20))
        said = read_all(large)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in said
    assert b"the limit is" in said


@pytest.mark.parametrize(
    ("path", "body"),
    [("/detokenize", {"tokens": [65] * 9}), ("/tokenize", {"prompt": "abc", "return_token_strs": True})],
)
def test_tokens_are_spelled_in_a_thread_for_there_may_be_a_million(url, session, monkeypatch, path, body):
    threads = set()

    def told(spell):
        return lambda one: threads.add(threading.get_ident()) or spell(one)

    for name in ("token_bytes", "token_text"):
        monkeypatch.setattr(session.text, name, told(getattr(session.text, name)))

    assert httpx.post(url + path, json=body, timeout=60).status_code == 200
    assert threads
    assert threads.isdisjoint(loops())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": ["hello", "you"], "prompt_logprobs": 2, "n": 2}),
        ("/v1/chat/completions", {"messages": SEEN, "prompt_logprobs": 2}),
    ],
)
def test_a_prompts_probabilities_are_spelled_in_a_thread_too(url, session, monkeypatch, path, body):
    threads, spell = set(), session.text.token_bytes
    monkeypatch.setattr(session.text, "token_bytes", lambda one: threads.add(threading.get_ident()) or spell(one))

    assert httpx.post(url + path, json=body | {"max_tokens": 1}, timeout=60).status_code == 200
    assert threads
    assert threads.isdisjoint(loops())


@pytest.mark.parametrize(
    ("path", "body", "lists"),
    [
        ("/v1/completions", {"prompt": "hi", "logprobs": 2, "max_tokens": 9}, "openai.answers.completion_logprobs"),
        ("/v1/completions", {"prompt": ["hi", "you"], "logprobs": 2, "max_tokens": 1, "echo": True, "stream": True},
         "openai.answers.completion_logprobs"),
        ("/v1/chat/completions", {"messages": SEEN, "logprobs": True, "max_tokens": 9}, "openai.answers.chat_logprobs"),
        ("/v1/responses", {"input": "hi", "include": ["message.output_text.logprobs"], "max_output_tokens": 9},
         "responses.responses.chat_logprobs"),
    ],
)  # fmt: skip
def test_long_lists_of_probabilities_are_made_in_a_thread(url, monkeypatch, path, body, lists):
    """Of a whole answer, and of a prompt that a stream begins with."""
    threads, made = set(), pydoc.locate(f"triptych.server.{lists}")

    def told(*given, **more):
        threads.add(threading.get_ident())
        return made(*given, **more)

    monkeypatch.setattr(f"triptych.server.{lists}", told)
    assert httpx.post(url + path, json=body, timeout=60).status_code == 200
    assert threads
    assert threads.isdisjoint(loops())


def test_echoes_of_several_prompts_are_streamed_as_they_come_whole(url):
    body = {"prompt": ["hello", "you"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    streamed = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}, timeout=60).text
    found = [json.loads(line[6:])["choices"][0] for line in streamed.splitlines() if line.startswith("data: {")]
    for choice in whole:
        parts = [one for one in found if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in parts) == choice["text"]
        listed = [token for one in parts if one["logprobs"] for token in one["logprobs"]["tokens"]]
        assert listed == choice["logprobs"]["tokens"]


def loops() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == "triptych-server"}
