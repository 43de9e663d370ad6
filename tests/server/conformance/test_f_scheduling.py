"""Section F: nobody waits for ever, nobody is held up by who asks for much, and all comes back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from asking import is_clean, png, see
from conforming import UNSEALED, ask, refused, told
from scripted import ScriptedSession, eventually, serving
from triptych.server.config import ServerConfig
from triptych.testing import TinyEngine, plan, tiny_session, tiny_session_over


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_pictures=some.integers(1, 8),
    cache_bytes=some.sampled_from([1, 40, 200]),
    step=some.sampled_from([4, 5, 9, 32]),
    num_blocks=some.sampled_from([16, 20]),
)
def test_t46_pictures_beyond_every_budget_are_served_or_refused_and_never_wait_for_ever(
    num_pictures, cache_bytes, step, num_blocks
):
    tight = plan(
        encoder_cache_bytes=cache_bytes, max_num_batched_tokens=step, num_blocks=num_blocks, vision_batch=1,
        max_num_seqs=4, max_multimodal_tokens=24,
    )  # fmt: skip
    pictures = [png(at) for at in range(num_pictures)]
    with tiny_session(tight) as session, serving(session) as url, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda at: ask(url, *pictures, text=f"{at}"), range(3)))
        for answer in answers:
            if num_pictures * 4 > 24:
                assert "limit is 24" in refused(answer)
            else:
                told(answer)
        assert eventually(lambda: is_clean(session))


def test_t46_a_refusal_at_the_door_names_the_knob():
    with tiny_session(plan(max_images=2)) as session, serving(session) as url:
        assert "--limit-mm-per-prompt" in refused(ask(url, png(1), png(2), png(3)))
    with tiny_session(plan(max_model_len=64)) as session, serving(session) as url:
        assert "--max-model-len" in refused(ask(url, text="x" * 500))


def test_t48_an_encoder_without_memory_fails_one_request_and_the_next_is_served():
    engine = TinyEngine()

    def out_of_memory(pixels: Any) -> bool:
        if int(pixels.mean()) == 123:
            raise MemoryError("cannot allocate 9 GB")
        return False

    engine.encoder.fail_when = out_of_memory
    with tiny_session_over(engine) as session, serving(session) as url, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda brightness: ask(url, png(brightness)), (120, 123, 121, 122)))
        assert [answer.status_code for answer in answers] == [200, 500, 200, 200]
        assert answers[1].json()["error"]["message"]
        told(ask(url, png(124)))
        assert eventually(lambda: is_clean(session))


def test_t49_health_and_text_answer_while_a_picture_takes_its_time():
    engine, release = TinyEngine(), threading.Event()
    engine.encoder.fail_when = lambda pixels: not release.wait(60)
    with tiny_session_over(engine) as session, serving(session) as url, ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(ask, url, png(brightness)) for brightness in range(3)]
        assert eventually(lambda: session.stats().num_running + session.stats().num_waiting == 3)
        assert httpx.get(f"{url}/health", **UNSEALED).status_code == 200
        for number in range(5):
            told(ask(url, text=f"short {number}"))
        assert not any(one.done() for one in slow)
        release.set()
        assert [one.result().status_code for one in slow] == [200] * 3


def test_t50_an_engine_that_hangs_is_not_healthy():
    session = ScriptedSession()
    with serving(session, ServerConfig(stall_s=5)) as url:
        session.stuck_s = 6
        answer = httpx.get(f"{url}/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "stalled")


@pytest.mark.parametrize("kind", ["whole", "stream", "inspect", "refused"])
def test_t52_hundreds_of_large_requests_leave_nothing_in_memory(kind):
    import gc

    import psutil

    pad = "x" * 400_000
    with tiny_session() as session, serving(session) as url, httpx.Client(base_url=url, **UNSEALED) as client:
        memory = []
        for number in range(90):
            body: dict[str, Any] = {"messages": see("hi", png(number % 7)), "user": pad, "max_tokens": 2}
            path = "/v1/media/inspect" if kind == "inspect" else "/v1/chat/completions"
            if kind == "refused":
                body["messages"] = see("hi", "data:image/png;base64," + "A" * 400_000)
            answer = client.post(path, json=body | {"stream": kind == "stream"})
            assert answer.status_code == (400 if kind == "refused" else 200)
            if number % 30 == 29:
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)
        assert eventually(lambda: is_clean(session))
    assert memory[-1] - memory[0] < 15 << 20, memory


def test_a_crowd_beyond_the_queue_is_told_when_to_come_back_and_then_served():
    engine, release = TinyEngine(plan(max_num_seqs=1, max_num_queued=2)), threading.Event()
    engine.decoder.fail_when = lambda arrays: not release.wait(60)
    with tiny_session_over(engine) as session, serving(session) as url, ThreadPoolExecutor(3) as pool:
        first = [pool.submit(ask, url, text=f"{number}") for number in range(3)]
        assert eventually(lambda: session.stats().num_running + session.stats().num_waiting == 3)
        answers = [ask(url, text=f"late {number}") for number in range(4)]
        assert [answer.status_code for answer in answers] == [429] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        release.set()
        assert [one.result().status_code for one in first] == [200] * 3
        began = time.monotonic()
        while ask(url, text="late").status_code == 429:
            assert time.monotonic() - began < 30
            time.sleep(0.1)
        assert eventually(lambda: is_clean(session))
