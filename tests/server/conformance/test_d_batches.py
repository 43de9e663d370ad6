"""Section D: who is served beside whom, and in what portions, changes no answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from PIL import Image

from asking import is_clean, png, see
from conforming import UNSEALED, ask, refused, told, uri
from pictures import saved
from scripted import eventually, serving
from triptych.testing import TinyEngine, plan, tiny_session, tiny_session_over

SIZES = ((224, 224), (1024, 256), (30, 40), (3, 2))


def picture(size: tuple[int, int], seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return uri(saved(Image.fromarray(pixels), "PNG"))


PICTURES = [picture(size, at) for at, size in enumerate(SIZES)]


def asked(number: int) -> dict[str, Any]:
    """Text alone, or one to three pictures of different sizes."""
    shown = [PICTURES[(number + at) % len(SIZES)] for at in range(number % 4)]
    return {"messages": see(f"question {number}", *shown), "max_tokens": 3 + number % 7, "temperature": 0}


def answer(url: str, number: int) -> tuple[str, int]:
    body = httpx.post(f"{url}/v1/chat/completions", json=asked(number), **UNSEALED).json()
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    step=some.sampled_from([8, 16, 33, 64]),
    vision_batch=some.sampled_from([1, 3, 8]),
    shares=some.booleans(),
    numbers=some.lists(some.integers(0, 30), min_size=6, max_size=14),
)
def test_t26_t27_t31_together_equal_alone_whatever_the_portions(step, vision_batch, shares, numbers):
    with tiny_session() as session, serving(session) as url:
        alone = {number: answer(url, number) for number in set(numbers)}
    portions = plan(max_num_batched_tokens=step, vision_batch=vision_batch, share_prefixes=shares, max_num_seqs=8)
    with tiny_session(portions) as session, serving(session) as url, ThreadPoolExecutor(14) as pool:
        together = list(pool.map(lambda number: answer(url, number), numbers))
        assert eventually(lambda: is_clean(session))
    assert together == [alone[number] for number in numbers]


@pytest.mark.parametrize("max_model_len", [63, 64, 65, 127])
def test_t27_a_context_below_or_above_the_step_is_the_same(max_model_len):
    """The prompt fills the context to its last token."""
    with tiny_session(plan(max_model_len=max_model_len, max_num_batched_tokens=64)) as session, serving(session) as url:
        room = max_model_len - told(ask(url, text="", max_tokens=1))[1] - 1
        full = ask(url, text="x" * room, max_tokens=1)
        assert told(full)[1] == max_model_len - 1
        refused(ask(url, text="x" * (room + 1), max_tokens=1))
    with tiny_session() as session, serving(session) as url:
        assert told(ask(url, text="x" * room, max_tokens=1)) == told(full)


def test_t29_text_alone_touches_no_encoder():
    engine = TinyEngine()
    with tiny_session_over(engine) as session, serving(session) as url:
        told(ask(url))
        metrics = httpx.get(f"{url}/metrics").text
        assert engine.encoder.num_tiles == 0
        assert not session.placements().keys() & {"vision", "projector"}
        told(ask(url, png(9)))
        assert engine.encoder.num_tiles == 1
    assert 'vllm:mm_cache_queries_total{model_name="tiny"} 0.0' in metrics


def test_t32_a_picture_that_is_nan_fails_its_own_request_with_a_status_and_is_counted():
    engine = TinyEngine()
    with tiny_session_over(engine) as session, serving(session) as url:
        good = told(ask(url, png(10)))
        whole = engine.encoder.__class__.__call__

        def broken(self: Any, arrays: Any) -> Any:
            out = whole(self, arrays)
            out["features"][arrays["pixels"].mean(axis=(1, 2, 3)) == 66] = np.nan
            return out

        try:
            engine.encoder.__class__.__call__ = broken  # type: ignore[method-assign]
            results: list[httpx.Response] = []
            thread = threading.Thread(target=lambda: results.append(ask(url, png(66), stream=True)))
            thread.start()
            told(ask(url, png(11)))
            thread.join()
        finally:
            engine.encoder.__class__.__call__ = whole  # type: ignore[method-assign]
        assert results[0].status_code == 500
        assert "NaN" in results[0].json()["error"]["message"]
        assert 'vllm:corrupted_requests_total{model_name="tiny"} 1.0' in httpx.get(f"{url}/metrics").text
        assert told(ask(url, png(10)))[:2] == good[:2]
        assert eventually(lambda: is_clean(session))
