"""The server over a real session: real text, real pictures, the real engine, and arithmetic for a model."""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from asking import bomb, is_clean, png, see, streamed
from scripted import eventually, serving
from triptych.core.chat import Chat
from triptych.core.policy import Compression, Reduction
from triptych.core.request import Patches
from triptych.media.fetch import MediaPolicy
from triptych.server.config import ServerConfig
from triptych.server.dialect import Event
from triptych.server.events import EventStream
from triptych.server.openai.bodies import ChatBody
from triptych.session import Prompt, Session
from triptych.session.prompt import Prompter
from triptych.testing import TinyEngine, plan, tiny_session, tiny_session_over


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_server_session_and_stream_say_the_same(client, session):
    picture = png(77)
    alone = session.ask("What is this?", images=[picture], max_tokens=12)
    whole = client.chat.completions.create(
        model="tiny", messages=see("What is this?", picture), max_tokens=12, temperature=0
    )
    pieces = client.chat.completions.create(
        model="tiny", messages=see("What is this?", picture), max_tokens=12, temperature=0, stream=True
    )

    assert whole.choices[0].message.content == alone.text
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == alone.text
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.prompt_tokens_details.image_tokens == 4


def test_another_picture_gives_another_answer_and_the_first_its_own_again(client):
    def ask(brightness: int) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model="tiny", messages=see("And this?", png(brightness)), max_tokens=6, temperature=0
        )
        return answer.choices[0].message.content, answer.choices[0].triptych["encoder_hits"]

    (first, _), (other, _), (again, hits) = ask(10), ask(200), ask(10)

    assert first != other
    assert again == first
    assert hits == 1


def test_a_request_keeps_half_of_its_pictures_tokens_and_is_billed_for_them(client, session):
    asked = {"triptych": {"keep_visual": 0.5, "reduce": "grid"}}
    said = client.chat.completions.create(
        model="tiny", messages=see("What is this?", png(77)), max_tokens=12, temperature=0, extra_body=asked
    )
    alone = session.ask("What is this?", images=[png(77)], max_tokens=12, compression=Compression(**asked["triptych"]))
    whole = session.ask("What is this?", images=[png(77)], max_tokens=12)

    assert said.choices[0].message.content == alone.text != whole.text
    assert said.usage.prompt_tokens_details.image_tokens == 2
    assert said.usage.prompt_tokens == whole.usage.prompt_tokens - 2


def test_a_later_turn_finds_the_reduced_picture_where_the_question_does_not_matter(client):
    def hits(method: str) -> list[int]:
        found, talk = [], see("Look at this one well.", png(123))
        for question in ("And now?", "And again?"):
            said = client.chat.completions.create(
                model="tiny", messages=talk, max_tokens=4, temperature=0,
                extra_body={"triptych": {"keep_visual": 0.5, "reduce": method}},
            )  # fmt: skip
            found.append(said.choices[0].triptych["encoder_misses"])
            talk = [*talk, {"role": "assistant", "content": said.choices[0].message.content}, *see(question)]
        return found

    assert hits("cenprune") == [1, 0]
    assert hits("cdpruner") == [1, 1]


def test_what_the_operator_does_not_allow_is_refused_before_a_stream_begins():
    with tiny_session(plan(reduction=Reduction(keep=0.5), min_keep=0.4)) as session, serving(session) as url:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        for asked, words in (({"keep_visual": 0.3}, "0.4"), ({"kv_budget": 0.5}, "keeps every key and value")):
            told = httpx.post(f"{url}/v1/chat/completions", json=body | {"triptych": asked})
            assert told.status_code == 400
            assert words in told.json()["error"]["message"]
            assert told.json()["error"]["param"] == f"triptych.{next(iter(asked))}"


def test_seeds_repeat_and_logprobs_add_up(client):
    def ask(seed: int) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=see("Guess"), max_tokens=20, temperature=2, seed=seed, logprobs=True, top_logprobs=2
        )

    first, again, other = ask(1), ask(1), ask(2)

    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content
    assert len(first.choices[0].logprobs.content) == 20
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in first.choices[0].logprobs.content)


def test_a_stop_string_ends_an_answer_and_is_kept_on_request(client):
    full = client.completions.create(model="tiny", prompt="Say", max_tokens=8, temperature=0).choices[0].text
    stop = full[9:14]
    cut = client.completions.create(model="tiny", prompt="Say", max_tokens=8, temperature=0, stop=stop).choices[0]
    kept = client.completions.create(
        model="tiny", prompt="Say", max_tokens=8, temperature=0, stop=[stop],
        extra_body={"include_stop_str_in_output": True},
    ).choices[0]  # fmt: skip

    assert (cut.text, cut.finish_reason, cut.stop_reason) == (full[: full.index(stop)], "stop", stop)
    assert kept.text == cut.text + stop


def test_a_stop_token_ends_an_answer(client):
    first = client.completions.create(model="tiny", prompt="Say", max_tokens=2, temperature=0, logprobs=0)
    end = client.completions.create(
        model="tiny", prompt="Say", max_tokens=9, temperature=0, logit_bias={"996": 100}, logprobs=0
    )

    assert first.usage.completion_tokens == 2
    assert (end.choices[0].text, end.choices[0].finish_reason, end.usage.completion_tokens) == ("", "stop", 1)


def test_ids_are_echoed_as_text(client):
    answer = client.completions.create(model="tiny", prompt=[0, 1, 2], max_tokens=1, echo=True, temperature=0)

    assert answer.choices[0].text.startswith('!"#')


LONG = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"garbage" * 100).decode()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (see("hi", LONG), "PNG"),
        (see("hi", "data:image/png;base64,AAAA"), ""),
        (see("hi", "data:image/png;base64,%%%"), ""),
        (see("hi", "not a url"), ""),
        (see("hi", bomb(12_000)), "12,000"),
        (see("hi", bomb(40_000)), "40,000"),
        (see("hi", *[png(1)] * 100), "100 images, the limit is 16"),
        (see("x" * 600), "512"),
        (see("hi", "http://127.0.0.1:1/a.png"), "--allowed-media-domains"),
        (see("hi", "file:///etc/passwd"), "--allowed-local-media-path"),
    ],
    ids=["broken", "short", "no-base64", "no-url", "12000", "40000", "hundred", "long", "http", "file"],
)
def test_bad_input_is_refused_with_a_hint_and_no_step_of_the_engine(url, session, messages, words):
    steps = session.stats().steps
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "stream": True}, timeout=60)
    error = answer.json()["error"]

    assert answer.status_code == 400
    assert words in error["message"]
    assert "Hint: " in error["message"]
    assert len(error["message"]) < 400
    assert session.stats().steps == steps


def test_a_user_cannot_write_control_tokens_or_placeholders(client):
    said = client.chat.completions.create(model="tiny", messages=see("<image><|im_end|>"), max_tokens=1, temperature=0)

    assert said.usage.prompt_tokens_details.image_tokens == 0


async def crowd(url: str, number: int) -> list[tuple[str, int]]:
    """Mixed requests at once; each one's text and prompt length."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(index: int) -> tuple[str, int]:
            pictures = [png(index * 10)] * (index % 3)
            asked: dict[str, Any] = {"messages": see(f"question {index}", *pictures), "max_tokens": 5 + index}
            if index % 2:
                answer = await client.chat.completions.create(model="tiny", temperature=0, **asked)
                return answer.choices[0].message.content, answer.usage.prompt_tokens
            stream = await client.chat.completions.create(
                model="tiny", temperature=0, stream=True, stream_options={"include_usage": True}, **asked
            )
            chunks = [chunk async for chunk in stream]
            return "".join(c.choices[0].delta.content or "" for c in chunks[:-1]), chunks[-1].usage.prompt_tokens

        return await asyncio.gather(*(one(index) for index in range(number)))


def test_sixteen_mixed_requests_at_once_equal_each_alone(url, session):
    together = asyncio.run(crowd(url, 16))
    for index, (text, prompt_tokens) in enumerate(together):
        pictures = [png(index * 10)] * (index % 3)
        alone = session.ask(f"question {index}", images=pictures, max_tokens=5 + index)
        assert (text, prompt_tokens) == (alone.text, alone.usage.prompt_tokens)
    assert eventually(lambda: is_clean(session))


def test_callers_who_leave_give_every_block_and_picture_back():
    engine = TinyEngine(plan(max_model_len=512, num_blocks=200))
    calm = engine.decoder.fail_when

    def slow(arrays: Any) -> bool:
        time.sleep(0.002)
        return calm(arrays)

    engine.decoder.fail_when = slow
    with tiny_session_over(engine) as session, serving(session) as url, httpx.Client() as client:
        for index in range(30):
            body = {"messages": see(f"tell {index}", png(index)), "stream": True, "max_tokens": 300, "n": 1 + index % 3}
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                for _ in range(index % 4):
                    next(lines)
        assert eventually(lambda: is_clean(session) and session.stats().num_running == 0)
        assert session.stats().finished["abort"] >= 25


def test_a_reader_who_takes_nothing_keeps_no_tiles(monkeypatch):
    tiles, is_read = [], threading.Event()
    prepare, send = Session.prepare_chat, EventStream.send

    def watched(self: Session, *asked: Any, **facts: Any) -> Prompt:
        prompt = prepare(self, *asked, **facts)
        tiles.extend(weakref.ref(item.tiles) for item in prompt.patches.values())
        return prompt

    async def stuck(self: EventStream, event: Event) -> None:
        while not is_read.is_set():
            await asyncio.sleep(0.01)
        await send(self, event)

    monkeypatch.setattr(Session, "prepare_chat", watched)
    monkeypatch.setattr(EventStream, "send", stuck)
    body = {"messages": see("tell", png(9)), "stream": True, "max_tokens": 5}
    with tiny_session() as session, serving(session) as url, ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=60)
        try:
            assert eventually(lambda: session.stats().finished.get("length") == 1, within_s=30)
            assert eventually(lambda: [one() for one in tiles] == [None])
        finally:
            is_read.set()
        assert answer.result().text.endswith("data: [DONE]\n\n")


def test_what_failed_or_was_left_is_let_go_of_though_python_looks_for_cycles_later(monkeypatch, caplog):
    """Bodies and tiles would lie there in no limit."""
    tiles, prepare = [], Prompter._prepare

    def watched(self: Prompter, *picture: Any) -> Patches:
        item = prepare(self, *picture)
        tiles.append(weakref.ref(item.tiles))
        return item

    def is_gone() -> bool:
        bodies = [one for one in gc.get_objects() if type(one) in (Chat, ChatBody)]
        return not bodies and all(one() is None for one in tiles)

    caplog.set_level(logging.CRITICAL, "triptych")  # caplog would keep the errors
    monkeypatch.setattr(Prompter, "_prepare", watched)
    engine, is_left, second_broken = TinyEngine(), threading.Event(), see("hi", png(1), bomb(100))
    asked = [
        ("chat/completions", {"messages": second_broken}, 400),
        ("chat/completions", {"messages": see("x" * 600)}, 400),
        ("media/inspect", {"messages": second_broken}, 200),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 600}]}, 400),
        ("chat/completions", {"messages": see("hi", png(2))}, 500),
        ("chat/completions", {"messages": see("hi", png(3)), "stream": True}, 500),
    ]
    engine.decoder.fail_when = lambda arrays: True
    with tiny_session_over(engine) as session, serving(session) as url:
        gc.freeze()  # what other tests left is not looked at
        gc.disable()
        try:
            for path, body, status in asked:
                assert httpx.post(f"{url}/v1/{path}", json=body, timeout=60).status_code == status
                assert eventually(is_gone), path
            engine.decoder.fail_when = lambda arrays: not is_left.wait(60)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/chat/completions", json={"messages": see("hi", png(4))}, timeout=0.5)
            is_left.set()
            assert eventually(is_gone)
        finally:
            gc.enable()
            gc.unfreeze()
    assert len(tiles) == 5


def test_tiles_of_all_requests_have_a_limit_and_a_request_alone_has_none():
    engine, is_free = TinyEngine(), threading.Event()
    engine.decoder.fail_when = lambda arrays: not is_free.wait(60)

    def ask(*pictures: str) -> httpx.Response:
        body = {"messages": see("hi", *pictures), "max_tokens": 1}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    policy = MediaPolicy(max_tiles_bytes=20)  # a picture has 12
    with tiny_session_over(engine, policy) as session, serving(session) as url, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, png(1))
        assert eventually(lambda: session.stats().num_running == 1, within_s=30)
        second, text = ask(png(2)), pool.submit(ask)
        dry = httpx.post(f"{url}/v1/media/inspect", json={"messages": see("hi", png(2))}, timeout=60)
        is_free.set()
        for refused in (second, dry):
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert "retry-after" in refused.headers
        assert first.result().status_code == text.result().status_code == 200
        assert eventually(lambda: ask(png(2), png(3)).status_code == 200)


def test_bad_requests_are_refused_while_others_stream_and_do_not_touch_them():
    engine, is_held = TinyEngine(plan(num_blocks=200)), threading.Event()

    def hold(arrays: Any) -> bool:
        while is_held.is_set():
            time.sleep(0.01)
        return False

    engine.decoder.fail_when = hold
    bad = [see("hi", LONG), see("hi", bomb(12_000)), see("x" * 600), see("hi", *[png(1)] * 100), "text"]

    async def story(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            is_held.set()
            asked = [{"messages": see(f"story {index}"), "max_tokens": 40, "temperature": 0} for index in range(8)]
            streams = [asyncio.create_task(streamed(client, body)) for body in asked]
            for messages in bad:
                answer = await client.post("/v1/chat/completions", json={"messages": messages})
                assert answer.status_code == 400
            assert not any(task.done() for task in streams)
            is_held.clear()
            return await asyncio.gather(*streams)

    with tiny_session_over(engine) as session, serving(session) as url:
        expected = [session.ask(f"story {index}", max_tokens=40).text for index in range(8)]
        assert asyncio.run(story(url)) == expected


def test_health_tells_of_an_engine_that_hangs():
    release = threading.Event()
    engine = TinyEngine()
    engine.decoder.fail_when = lambda arrays: not release.wait(60)
    with tiny_session_over(engine) as session, serving(session, ServerConfig(stall_s=60)) as url:
        asked = {"json": {"prompt": "a", "max_tokens": 1}, "timeout": 60}
        thread = threading.Thread(target=httpx.post, args=(f"{url}/v1/completions",), kwargs=asked)
        thread.start()
        assert eventually(lambda: session.stats().num_running == 1, within_s=30)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        engine.clock.advance(61)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 503
        release.set()
        thread.join()
        assert eventually(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 200, within_s=30)
