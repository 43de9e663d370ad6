"""Section G: the API says what it did: text whole, usage that adds up, pictures where they were put."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from asking import png
from conforming import UNSEALED, ask, inspect, refused, told
from scripted import serving
from triptych.media.fetch import MediaPolicy
from triptych.session import Session
from triptych.testing import END_ID, VOCAB, TinyEngine, tiny_manifest, tiny_text

CHAT = "/v1/chat/completions"


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def forced(url: str, session: Session, text: str, **body: Any) -> httpx.Response:
    """An answer of just these bytes: a choice of one leaves the model no other."""
    return ask(url, structured_outputs={"choice": [text]}, max_tokens=100, **body)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=some.text(some.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12))
def test_t53_a_character_of_many_tokens_is_never_sent_in_halves(url, session, text):
    streamed = events(forced(url, session, text, stream=True))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in streamed if event["choices"]]
    assert "".join(pieces) == text
    whole = forced(url, session, text).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")


def test_t53_a_limit_within_a_character_leaves_no_half_of_it(url, session):
    first, *rest = session.text.encode("👩")
    assert rest
    answer = events(ask(url, text="say", max_tokens=1, stream=True, logit_bias={str(first): 100}))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in answer]
    assert "".join(pieces) == ""
    assert answer[-1]["choices"][0]["finish_reason"] == "length"


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("pictures", [(), (png(5),)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_t55_a_schema_is_kept_with_a_picture_and_without_and_it_ends(url, pictures, is_stream):
    form = {"type": "json_schema", "json_schema": {"name": "seen", "strict": True, "schema": SCHEMA}}
    answer = ask(url, *pictures, response_format=form, max_tokens=80, stream=is_stream)
    assert answer.status_code == 200, answer.text
    if is_stream:
        chunks = [event["choices"][0] for event in events(answer) if event["choices"]]
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        finish = chunks[-1]["finish_reason"]
    else:
        text = answer.json()["choices"][0]["message"]["content"]
        finish = answer.json()["choices"][0]["finish_reason"]
    said = json.loads(text)
    assert set(said) == {"colour", "count"}
    assert said["colour"] in ("red", "blue")
    assert finish == "stop"


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shown=some.lists(some.integers(0, 9), max_size=4),
    n=some.integers(1, 3),
    keep=some.sampled_from([None, 0.25, 0.5, 1.0]),
)
def test_t56_usage_adds_up_and_a_stream_bills_as_a_whole_answer_does(url, shown, n, keep):
    pictures = [png(20 * one) for one in shown]
    less = {} if keep is None else {"triptych": {"keep_visual": keep, "reduce": "grid"}}
    whole = ask(url, *pictures, n=n, **less).json()["usage"]
    streamed = events(ask(url, *pictures, n=n, stream=True, stream_options={"include_usage": True}, **less))
    usage = streamed[-1]["usage"]
    details = usage["prompt_tokens_details"]

    assert streamed[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole[name]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert details["image_tokens"] == len(pictures) * round(4 * (keep or 1))
    assert 0 <= details["cached_tokens"] <= usage["prompt_tokens"]
    assert details["image_tokens"] < usage["prompt_tokens"]
    assert usage["prompt_tokens"] == inspect(url, *pictures, **less)["prompt_tokens"]


def test_t57_probabilities_of_a_prompt_are_null_where_a_picture_stands(url):
    answer = ask(url, png(7), prompt_logprobs=1, logprobs=True)
    assert answer.status_code == 200, answer.text
    found = answer.json()["prompt_logprobs"]
    assert len(found) == answer.json()["usage"]["prompt_tokens"]
    assert found[0] is None
    assert sum(one is None for one in found) == 1 + 4
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_t59_a_picture_stays_in_the_message_and_the_place_it_was_put(url, session, role):
    parts = [
        {"type": "text", "text": "before "},
        {"type": "image_url", "image_url": {"url": png(9)}},
        {"type": "text", "text": " after"},
    ]
    holder: dict[str, Any] = {"role": role, "content": parts}
    talk = [{"role": "user", "content": "go"}, holder, {"role": "user", "content": "and?"}]
    if role == "tool":
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        holder["tool_call_id"] = "c1"
        talk.insert(1, {"role": "assistant", "content": None, "tool_calls": [call]})
    told(httpx.post(f"{url}{CHAT}", json={"messages": talk, "max_tokens": 1}, **UNSEALED))
    ids = httpx.post(f"{url}/tokenize", json={"messages": talk}, **UNSEALED).json()["tokens"]
    at = ids.index(VOCAB)
    assert ids[at : at + 4] == [VOCAB] * 4
    assert bytes_of(session, ids[:at]).endswith(b"before ")
    assert bytes_of(session, ids[at + 4 :]).startswith(b" after")


def bytes_of(session: Session, ids: list[int]) -> bytes:
    return b"".join(session.text.token_bytes(one) for one in ids if one < END_ID)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(order=some.lists(some.sampled_from(["text", "bright", "dark"]), min_size=1, max_size=5))
def test_t59_the_order_of_parts_is_the_order_of_the_prompt(url, session, order):
    kinds = {
        "text": {"type": "text", "text": "T"},
        "bright": {"type": "image_url", "image_url": png(250)},
        "dark": {"type": "image_url", "image_url": png(5)},
    }
    body = {"messages": [{"role": "user", "content": [kinds[one] for one in order]}]}
    ids = httpx.post(f"{url}/tokenize", json=body, **UNSEALED).json()["tokens"]
    (letter,) = session.text.encode("T")
    shape = [letter if one == "text" else VOCAB for one in order]
    assert [one for at, one in enumerate(ids) if one in (letter, VOCAB) and not inside(ids, at)] == shape


def inside(ids: list[int], at: int) -> bool:
    """Whether it is a picture's second, third or fourth token."""
    first = at
    while first > 0 and ids[first - 1] == VOCAB:
        first -= 1
    return ids[at] == VOCAB and (at - first) % 4 != 0


@pytest.mark.parametrize("detail", ["auto", "low", "high", None])
def test_t61_a_detail_is_known_and_another_word_is_refused(url, detail):
    part = {"type": "image_url", "image_url": {"url": png(1), "detail": detail}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    assert httpx.post(f"{url}{CHAT}", json=body, **UNSEALED).status_code == 200
    part["image_url"] = {"url": png(1), "detail": "8k"}
    assert "8k" in refused(httpx.post(f"{url}{CHAT}", json=body, **UNSEALED))


@pytest.fixture(scope="module")
def split_url() -> Iterator[str]:
    """A model that shows a picture as a grid of tiles, then whole."""
    engine, manifest = TinyEngine(), tiny_manifest()
    grid = {"tiling": "split", "longest_edge": 8, "tile_size": 2}
    image = msgspec.structs.replace(manifest.spec.image, **grid)
    manifest = msgspec.structs.replace(manifest, spec=msgspec.structs.replace(manifest.spec, image=image))
    places = {"decoder": "arithmetic"}
    with Session(manifest, tiny_text(), engine.engine, MediaPolicy(), places) as session, serving(session) as url:
        yield url


@pytest.mark.parametrize(
    ("change", "tiles"),
    [
        ({}, 17),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 4}}}, 5),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 2}}}, 1),
        ({"mm_processor_kwargs": {"do_image_splitting": False}}, 1),
        ({"mm_processor_kwargs": {"do_image_splitting": True}}, 17),
    ],
)
def test_t61_a_request_chooses_how_large_its_pictures_are_and_is_billed_for_that(split_url, change, tiles):
    picture = png(99, (16, 16))
    usage = ask(split_url, picture, **change).json()["usage"]
    found = inspect(split_url, picture, **change)
    assert usage["prompt_tokens_details"]["image_tokens"] == 4 * tiles == found["media"][0]["tokens"]
    assert found["media"][0]["tiles"] == tiles
    assert usage["prompt_tokens"] == found["prompt_tokens"]


def test_t61_low_detail_is_one_tile(split_url):
    part = {"type": "image_url", "image_url": {"url": png(99, (16, 16)), "detail": "low"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    usage = httpx.post(f"{split_url}{CHAT}", json=body, **UNSEALED).json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": {"longest_edge": 9}}, "N from 2 (one tile) to 8 pixels"),
        ({"size": {"longest_edge": 1}}, "N from 2"),
        ({"size": 4}, "longest_edge"),
        ({"do_image_splitting": "no"}, "not true or false"),
        ({"max_pixels": 100}, "known are do_image_splitting, size, image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[2, 2]]}, "choose among"),
    ],
)
def test_t61_more_than_the_operator_gives_or_unknown_settings_are_refused(split_url, change, words):
    answer = ask(split_url, png(99), mm_processor_kwargs=change)
    assert words in refused(answer)
    assert answer.json()["error"]["param"] == "mm_processor_kwargs"


def test_t61_fields_that_would_change_a_picture_are_honoured_or_refused_and_never_ignored(url):
    for field in (
        {"mm_processor_kwargs": {"max_pixels": 100}},
        {"media_io_kwargs": {"image": {"x": 1}}},
        {"max_pixels": 9},
    ):
        refused(ask(url, png(3), **field))


def test_what_is_said_of_a_picture_alone_is_an_answer(url):
    content = [{"type": "image_url", "image_url": {"url": png(3)}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    told(httpx.post(f"{url}{CHAT}", json=body, **UNSEALED))
