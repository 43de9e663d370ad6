"""Section E: a cache answers for the same thing or not at all."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from PIL import Image

from asking import is_clean, png, see
from conforming import UNSEALED, ask, inspect, told, uri
from pictures import saved
from scripted import eventually, serving
from triptych.media.fetch import MediaPolicy
from triptych.server.config import ServerConfig
from triptych.session import Session
from triptych.testing import plan, tiny_session


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def session(root: Any) -> Iterator[Session]:
    with tiny_session(policy=MediaPolicy(allowed_local_root=root)) as session:
        yield session


def fresh(url: str, *pictures: str, **body: Any) -> tuple[str, int]:
    """What is said to a tenant that nobody has seen before: no cache answers it."""
    text, num_tokens, misses = told(ask(url, *pictures, **body, cache_salt=secrets.token_hex(8)))
    assert misses == len(set(pictures))
    return text, num_tokens


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(shown=some.lists(some.lists(some.integers(0, 5), max_size=3), min_size=2, max_size=6))
def test_t34_any_order_of_pictures_under_one_question_is_answered_as_if_it_were_the_first(session, url, shown):
    for brightness in shown:
        pictures = [png(20 * one) for one in brightness]
        assert told(ask(url, *pictures))[:2] == fresh(url, *pictures)
    assert eventually(lambda: is_clean(session))


def test_t35_a_picture_is_named_by_all_of_its_256_bits(session, url):
    """Pictures that differ in one pixel's last bit have names that differ in half of their digits."""
    one, other = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "red")
    other.putpixel((7, 7), (254, 0, 0))
    items = [session.prepare_chat(chat(uri(saved(image, "PNG")))).spans[0].digest for image in (one, other)]
    assert [len(digest) for digest in items] == [64, 64]
    assert sum(a != b for a, b in zip(*items, strict=True)) > 40


def chat(source: str) -> Any:
    from triptych.core.chat import Chat, ImagePart, Message

    return Chat(messages=(Message(role="user", parts=(ImagePart(source=source),)),))


def test_t37_an_id_that_the_caller_gives_is_not_believed(url):
    def asked(brightness: int) -> str:
        part = {"type": "image_url", "image_url": {"url": png(brightness)}, "uuid": "same"}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4, "temperature": 0}
        said: str = httpx.post(f"{url}/v1/chat/completions", json=body, **UNSEALED).json()["choices"][0]["message"][
            "content"
        ]
        return said

    assert asked(31) != asked(231)
    assert asked(31) == asked(31)


def test_t39_a_file_that_is_rewritten_is_another_picture(url, root):
    said = []
    for colour in ("red", "white", "red"):
        (root / "frame.png").write_bytes(saved(Image.new("RGB", (6, 6), colour), "PNG"))
        said.append(told(ask(url, f"file://{root}/frame.png", text="Which colour?"))[0])
    assert said[0] == said[2] != said[1]


@pytest.mark.parametrize("change", ["weights_digest", "tenant", "settings", "geometry", "modality"])
def test_t40_everything_that_features_depend_on_is_in_their_name(change):
    from triptych.core.spec import Modality
    from triptych.media.registry import DigestFacts, digest

    facts: dict[str, Any] = dict(
        modality=Modality.IMAGE, content_sha256="a" * 64, geometry=(2, 3), settings="{}", weights_digest="w", tenant="t"
    )
    other = {"geometry": (3, 2), "modality": Modality.VIDEO}.get(change, "other")
    assert digest(DigestFacts(**facts)) != digest(DigestFacts(**{**facts, change: other}))


def test_t42_twenty_pictures_in_one_request_and_room_for_one():
    pictures = [png(at) for at in range(20)]
    small = plan(encoder_cache_bytes=64, max_images=20)
    with tiny_session(small) as session, serving(session) as url:
        crowded = told(ask(url, *pictures))
        assert eventually(lambda: is_clean(session))
    with tiny_session(plan(max_images=20)) as session, serving(session) as url:
        assert told(ask(url, *pictures)) == crowded


def test_t43_t45_asked_again_and_again_it_says_the_same_and_bills_the_same(url):
    text = "Look well. " * 30
    first = ask(url, png(77), text=text).json()
    for _ in range(3):
        again = ask(url, png(77), text=text).json()
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        assert again["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    with tiny_session(plan(share_prefixes=False)) as session, serving(session) as plain:
        assert ask(plain, png(77), text=text).json()["choices"][0]["message"] == first["choices"][0]["message"]


def test_neither_cache_is_shared_between_keys_or_salts_nor_told_of():
    config = ServerConfig(api_keys=("one", "two"))
    with tiny_session() as session, serving(session, config) as url:
        for key, salt in itertools.product(("one", "two"), (None, "a", "b")):
            headers = {"authorization": f"Bearer {key}"}
            body = {"messages": see("Who saw this?" * 9, png(50)), "max_tokens": 2, "cache_salt": salt}
            found = httpx.post(f"{url}/v1/media/inspect", json=body, headers=headers, **UNSEALED).json()
            assert found["media"][0]["is_encoded"] is False
            for seen in (0, 1):
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, **UNSEALED).json()
                assert answer["choices"][0]["triptych"]["encoder_misses"] == 1 - seen
                assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == bool(seen)
            found = httpx.post(f"{url}/v1/media/inspect", json=body, headers=headers, **UNSEALED).json()
            assert found["media"][0]["is_encoded"] is True


@pytest.mark.parametrize(
    "change", [{"triptych": {"keep_visual": 0.5}}, {"triptych": {"keep_visual": 0.5, "reduce": "grid"}}]
)
def test_a_picture_shown_otherwise_is_another_to_the_caches(url, change):
    whole = told(ask(url, png(88), text="How much?"))
    assert not inspect(url, png(88), text="How much?", **change)["media"][0]["is_encoded"]
    less = told(ask(url, png(88), text="How much?", **change))
    assert less[1] < whole[1]
    assert less[:2] == fresh(url, png(88), text="How much?", **change)
    assert told(ask(url, png(88), text="How much?"))[:2] == whole[:2]
