"""A dry run says beforehand what an answer's prompt turns out to be, and generates nothing."""

from __future__ import annotations

import httpx
import pytest
from PIL import Image

from asking import bomb, png, see
from conforming import PATIENT, ask, inspect, refused, told, uri
from pictures import exif, saved
from scripted import eventually


def test_it_tells_what_the_file_is_and_how_it_will_be_seen(url):
    data = saved(Image.new("RGB", (30, 20), "red"), "JPEG", exif=exif(6))
    (facts,) = inspect(url, uri(data, "image/png"))["media"]
    assert facts == {
        "type": "image", "format": "JPEG", "bytes": len(data), "stored_size": [30, 20], "size": [20, 30],
        "orientation": 6, "tiles": 1, "tokens": 4, "kept_tokens": 4, "is_encoded": False, "error": None,
    }  # fmt: skip


@pytest.mark.parametrize("less", [{}, {"triptych": {"keep_visual": 0.5, "reduce": "grid"}}])
def test_its_tokens_are_those_that_are_billed(url, less):
    pictures = [png(1), png(2), png(1)]
    found = inspect(url, *pictures, **less)
    usage = ask(url, *pictures, **less).json()["usage"]
    assert found["prompt_tokens"] == usage["prompt_tokens"]
    assert sum(one["kept_tokens"] for one in found["media"]) == usage["prompt_tokens_details"]["image_tokens"]


def test_nothing_is_generated_encoded_or_counted_as_an_answer(session, url):
    before = session.stats()
    inspect(url, png(200))
    after = session.stats()
    assert (after.steps, after.encoder_queries, after.finished) == (
        before.steps,
        before.encoder_queries,
        before.finished,
    )


def test_it_sees_what_its_tenant_has_encoded(url):
    assert not inspect(url, png(33))["media"][0]["is_encoded"]
    told(ask(url, png(33)))
    assert inspect(url, png(33))["media"][0]["is_encoded"]
    assert inspect(url, png(33))["predicted"]["encode_s"] == 0
    assert not inspect(url, png(33), cache_salt="other")["media"][0]["is_encoded"]


def test_it_predicts_by_what_was_measured(url):
    for brightness in range(40, 60):
        told(ask(url, png(brightness), text="Measure this" * 5))

    def is_told() -> bool:
        predicted = inspect(url, png(61))["predicted"]
        return predicted["encode_s"] is not None and predicted["encode_s"] > 0

    assert eventually(is_told)


def test_a_refusal_is_told_with_the_picture_to_blame(url):
    found = inspect(url, png(1), bomb(12_000))
    assert found["refusal"] == found["media"][1]["error"]
    assert "12,000×12,000" in found["refusal"]["message"]
    assert found["media"][0]["error"] is None
    assert found["predicted"] is None
    assert "12,000×12,000" in refused(ask(url, png(1), bomb(12_000)))


def test_a_prompt_that_is_too_long_is_told_before_its_pictures_are_unpacked(url):
    found = inspect(url, png(1), text="x" * 600)
    assert found["refusal"]["code"] == "context_length_exceeded"
    assert found["media"][0]["tokens"] == 4
    assert found["media"][0]["is_encoded"] is None


def test_a_picture_that_is_broken_behind_its_header_is_told_too(url):
    data = saved(Image.effect_noise((64, 64), 50), "PNG")
    found = inspect(url, uri(data[: len(data) // 2]))
    assert found["media"][0]["size"] == [64, 64]
    assert "cannot be decoded" in found["media"][0]["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": 3}', b'{"messages": [], "max_token": 1}'])
def test_a_body_that_is_no_chat_is_refused(url, body):
    refused(httpx.post(f"{url}/v1/media/inspect", content=body, timeout=PATIENT))


def test_a_form_that_a_chat_would_be_refused_for_is_refused_here_too(url):
    body = {"messages": see("a"), "guided_regex": "("}
    for path in ("/v1/chat/completions", "/v1/media/inspect"):
        answer = httpx.post(url + path, json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


def test_a_chat_without_pictures_has_tokens_too(url):
    found = inspect(url)
    assert found["media"] == []
    assert found["prompt_tokens"] == told(ask(url))[1]


def test_the_body_of_a_chat_is_taken_as_it_is(url):
    body = {"model": "tiny", "messages": see("hi", png(3)), "stream": True, "n": 2, "max_tokens": 9, "seed": 1}
    assert httpx.post(f"{url}/v1/media/inspect", json=body, timeout=PATIENT).json()["prompt_tokens"] > 4
