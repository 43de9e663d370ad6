"""The engine, whole, over a model that answers by arithmetic."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import threading
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pages
from sick import sicken, spoil
from triptych.core.request import Delta, FinishReason, Request, Sampling
from triptych.errors import BackendError, ContextError, DeadlineError, OverloadError, RequestError
from triptych.testing import (
    END_ID,
    BrightnessEncoder,
    PassProjector,
    TinyEngine,
    picture,
    plain_answer,
    plan,
    request,
)


def ask(engine: TinyEngine, prompts: dict[str, list], **kwargs) -> dict[str, list[int]]:
    requests = [request(name, prompt, **kwargs) for name, prompt in prompts.items()]
    for asked in requests:
        engine.submit(asked)
    engine.run()
    return {asked.id: engine.answer(asked.id) for asked in requests}


def test_a_request_is_answered_as_its_plain_twin_does():
    engine = TinyEngine()
    asked = request("a", [1, 2, 3, picture(90), 4, 5])
    engine.submit(asked)
    engine.run()
    assert engine.answer("a") == plain_answer(asked, 8)
    assert engine.last("a").finish is FinishReason.LENGTH
    assert engine.last("a").usage.prompt_tokens == 9
    assert engine.last("a").usage.image_tokens == 4
    assert engine.last("a").usage.completion_tokens == 8
    assert engine.is_clean()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 31, 32, 33, 64])
def test_a_chunk_edge_anywhere_even_inside_a_picture_changes_nothing(chunk: int):
    engine = TinyEngine(plan(max_num_batched_tokens=chunk, max_num_seqs=1))
    asked = request("a", [*range(30), picture(7, num_tiles=3), *range(40), picture(200), 9])
    engine.submit(asked)
    engine.run()
    assert engine.answer("a") == plain_answer(asked, 8)
    assert engine.encoder.num_tiles == 4, "each tile is encoded once, however many chunks it spans"


prompt_parts = st.one_of(
    st.integers(0, 900), st.builds(picture, st.integers(0, 5).map(lambda b: 40 * b), num_tiles=st.integers(1, 3))
)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(prompt_parts, min_size=1, max_size=40), min_size=1, max_size=12),
    chunk=st.integers(8, 40),
    num_blocks=st.integers(16, 40),
    cache_bytes=st.sampled_from([0, 64, 1 << 20]),
    vision_batch=st.integers(1, 4),
    share=st.booleans(),
)
def test_any_mixture_of_requests_is_answered_alike_and_leaves_nothing_behind(
    prompts, chunk, num_blocks, cache_bytes, vision_batch, share
):
    engine = TinyEngine(
        plan(
            max_num_batched_tokens=chunk,
            num_blocks=num_blocks,
            encoder_cache_bytes=cache_bytes,
            vision_batch=vision_batch,
            share_prefixes=share,
        )  # fmt: skip
    )
    requests = [request(str(index), prompt) for index, prompt in enumerate(prompts)]
    for asked in requests:
        engine.submit(asked)
    engine.run()
    for asked in requests:
        assert engine.answer(asked.id) == plain_answer(asked, 8)
    assert engine.is_clean()
    pages.check(engine.engine._blocks)


def test_preemption_recomputes_and_the_answer_is_the_same():
    engine = TinyEngine(plan(num_blocks=8, max_model_len=256, max_num_seqs=4))
    sampling = Sampling(max_tokens=100, temperature=0.0)
    requests = [request(str(index), [index] * 20, sampling=sampling) for index in range(4)]
    for asked in requests:
        engine.submit(asked)
    engine.run()
    assert engine.engine.stats().preemptions > 0
    for asked in requests:
        assert engine.answer(asked.id) == plain_answer(asked, 100)
    assert engine.is_clean()


def test_a_seen_prefix_is_not_computed_again_and_the_answer_is_the_same():
    engine = TinyEngine()
    prompt = [*range(100), picture(5), 3]
    first = ask(engine, {"a": prompt})["a"]
    again = ask(engine, {"b": prompt})["b"]
    assert again == first
    assert engine.last("b").usage.cached_tokens == 96
    assert engine.last("a").usage.cached_tokens == 0


def test_another_picture_or_another_tenant_never_hits():
    engine = TinyEngine()
    text = [*range(40)]
    ask(engine, {"a": [picture(5, num_tiles=10), *text]})
    other = request("b", [picture(6, num_tiles=10), *text])
    engine.submit(other)
    engine.run()
    assert engine.last("b").usage.cached_tokens == 0
    assert engine.answer("b") == plain_answer(other, 8)
    ask(engine, {"c": [picture(5, num_tiles=10), *text]}, tenant="someone else")
    assert engine.last("c").usage.cached_tokens == 0


def test_a_text_request_touches_no_encoder():
    engine = TinyEngine()
    ask(engine, {"a": [1, 2, 3]})
    assert engine.encoder.num_tiles == 0
    assert engine.runner.encoder.open_towers == frozenset()


def test_the_same_picture_is_encoded_once_for_all_who_show_it():
    engine = TinyEngine()
    ask(engine, {str(index): [index, picture(77, num_tiles=2), index] for index in range(5)})
    assert engine.encoder.num_tiles == 2
    stats = engine.engine.stats()
    assert (stats.encoder_queries, stats.encoder_hits) == (5, 4)


def test_a_picture_larger_than_the_cache_is_still_served():
    engine = TinyEngine(plan(encoder_cache_bytes=1, max_num_batched_tokens=8))
    asked = request("a", [1, picture(9, num_tiles=6), 2])
    engine.submit(asked)
    engine.run()
    assert engine.answer("a") == plain_answer(asked, 8)
    assert engine.encoder.num_tiles == 6
    assert engine.engine.stats().encoder_bytes == 0


def test_abort_returns_everything_wherever_the_request_is():
    engine = TinyEngine(plan(max_num_seqs=2))
    for name in "abcd":
        engine.submit(request(name, [1, picture(9), 2], sampling=Sampling(max_tokens=50, temperature=0.0)))
    engine.engine.step()
    for name in "abcd":
        engine.engine.abort(name)
    engine.engine.abort("nobody")
    engine.run()
    assert [engine.last(name).finish for name in "abcd"] == [FinishReason.ABORT] * 4
    assert engine.is_clean()
    assert engine.engine.stats().num_waiting == 0


def test_a_failing_picture_fails_its_own_request_only():
    engine = TinyEngine()
    engine.encoder.fail_when = lambda pixels: bool((pixels == 13).any())
    good = request("good", [1, picture(90), 2])
    engine.submit(request("bad", [1, picture(13), 2]))
    engine.submit(good)
    engine.run()
    assert engine.last("bad").finish is FinishReason.ERROR
    assert isinstance(engine.last("bad").error, BackendError)
    assert engine.answer("good") == plain_answer(good, 8)
    assert engine.is_clean()


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on():
    engine = TinyEngine()
    engine.decoder.fail_when = lambda arrays: engine.decoder.calls == 3
    ask(engine, {"a": [1, 2]})
    assert engine.last("a").finish is FinishReason.ERROR
    later = request("b", [3, 4])
    engine.submit(later)
    engine.run()
    assert engine.answer("b") == plain_answer(later, 8)
    assert engine.is_clean()


@pytest.mark.parametrize("ill", ["encoder", "decoder"])
def test_an_error_that_somebody_keeps_keeps_no_picture(ill: str, caplog):
    def fail(arrays):
        raise BackendError("no memory is left")

    caplog.set_level(logging.CRITICAL, "triptych.engine")  # caplog would keep it
    engine, asked = TinyEngine(), request("a", [1, picture(13)])
    getattr(engine, ill).fail_when = fail
    tiles = [weakref.ref(item.tiles) for item in asked.patches.values()]
    engine.submit(asked)
    del asked
    gc.disable()
    try:
        engine.run()
        assert "no memory is left" in str(engine.last("a").error)
        assert all(one() is None for one in tiles)
    finally:
        gc.enable()


class Overflowing(BrightnessEncoder):
    """Gives NaN for tiles of brightness 13, and counts its calls."""

    def __call__(self, arrays):
        out = super().__call__(arrays)
        out["features"][(arrays["pixels"] == 13).all(axis=(1, 2, 3))] = np.nan
        return out


def test_a_picture_that_overflows_is_encoded_once_more_in_full_precision_and_counted():
    engine = TinyEngine()
    engine.encoder, exact, opened = Overflowing(), BrightnessEncoder(), []
    towers = engine.runner.encoder._towers
    for modality, tower in towers.items():
        towers[modality] = dataclasses.replace(tower, open_exact=lambda: opened.append(1) or (exact, PassProjector()))
    first = request("first", [1, picture(90), 2])
    engine.submit(first)
    engine.run()
    assert opened == [], "opened only once it is needed"
    prompts = {"a": [1, picture(13), picture(90)], "b": [picture(50), 3], "c": [picture(13), 9]}
    answers = ask(engine, prompts)
    for name, prompt in prompts.items():
        assert answers[name] == plain_answer(request(name, prompt), 8)
    stats = engine.engine.stats()
    assert (stats.recomputed, stats.corrupted, len(opened), exact.num_tiles) == (1, 0, 1, 1)


def test_a_picture_that_overflows_even_so_fails_its_request_alone():
    engine = TinyEngine()
    engine.encoder = Overflowing()
    towers = engine.runner.encoder._towers
    for modality, tower in towers.items():
        towers[modality] = dataclasses.replace(tower, open_exact=lambda: (Overflowing(), PassProjector()))
    answers = ask(engine, {"a": [1, picture(13)], "b": [picture(50), 3]})
    assert isinstance(engine.last("a").error, BackendError)
    assert answers["b"] == plain_answer(request("b", [picture(50), 3]), 8)
    assert (engine.engine.stats().recomputed, engine.engine.stats().corrupted) == (0, 1)
    assert engine.is_clean()


def test_an_encoder_that_gives_nan_is_counted_and_fails_that_request_alone():
    engine = TinyEngine()
    engine.encoder = Overflowing()
    good = request("good", [1, picture(90), 2])
    engine.submit(request("bad", [1, picture(13), 2]))
    engine.submit(good)
    engine.run()
    assert engine.last("bad").finish is FinishReason.ERROR
    assert engine.answer("good") == plain_answer(good, 8)
    assert engine.engine.stats().corrupted == 1


def test_a_decoder_that_gives_nan_for_one_sequence_fails_that_one_alone():
    engine = TinyEngine()
    sicken(engine, after=13)
    good = request("good", [1, 2])
    engine.submit(request("bad", [1, 13]))
    engine.submit(good)
    engine.run()
    assert engine.last("bad").finish is FinishReason.ERROR
    assert engine.answer("good") == plain_answer(good, 8)
    assert engine.engine.stats().corrupted == 1


def test_pages_that_gave_nan_are_found_by_nobody():
    engine = TinyEngine()
    spoil(engine)
    ask(engine, {"bad": [*range(66)]})  # two blocks are full before the first logits are asked for
    assert engine.last("bad").finish is FinishReason.ERROR
    again = request("again", [*range(66)])
    engine.submit(again)
    engine.run()
    assert engine.last("again").usage.cached_tokens == 0
    assert engine.answer("again") == plain_answer(again, 8)
    assert engine.is_clean()
    pages.check(engine.engine._blocks)


def ended(engine: TinyEngine, name: str, within_s: float = 5.0) -> Delta:
    """The last delta of a request on a started engine."""
    until_s = time.monotonic() + within_s
    while not (engine.deltas[name] and engine.last(name).finish):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return engine.last(name)


def break_once(engine: TinyEngine) -> None:
    """The scheduler's next turn is a fault of the engine's own."""
    engine.engine._scheduler.schedule = lambda **how: 1 // 0


def test_a_fault_of_the_engine_itself_ends_every_request_and_it_begins_anew():
    engine = TinyEngine()
    ask(engine, {"before": [*range(100), picture(3)]})
    engine.submit(request("a", [*range(100), picture(3)]))
    engine.submit(request("b", [1, 2]))
    break_once(engine)
    engine.engine.start()
    for name in "ab":
        assert isinstance(ended(engine, name).error, BackendError)
        assert "ZeroDivisionError" in engine.last(name).error.message
    again = request("c", [*range(100), picture(3)])
    engine.submit(again)
    assert ended(engine, "c").usage.cached_tokens == 0, "what the engine knew may have been wrong"
    assert engine.answer("c") == plain_answer(again, 8)
    stats = engine.engine.stats()
    assert (stats.is_alive, stats.restarts, stats.num_waiting) == (True, 1, 0)
    engine.engine.close()
    assert engine.is_clean()


@pytest.mark.parametrize(("apart_s", "is_alive"), [(59.0, False), (61.0, True)])
def test_a_second_fault_within_a_minute_is_the_end_and_is_seen(apart_s: float, is_alive: bool):
    engine = TinyEngine()
    engine.submit(request("a", [1, 2]))
    break_once(engine)
    engine.engine.start()
    ended(engine, "a")
    engine.clock.advance(apart_s)
    with engine.engine._wake:
        break_once(engine)
    engine.submit(request("b", [1, 2]))
    assert isinstance(ended(engine, "b").error, BackendError)
    if not is_alive:
        engine.engine._thread.join(5)
        with pytest.raises(BackendError, match="has stopped"):
            engine.submit(request("c", [1]))
    assert engine.engine.stats().is_alive is is_alive
    engine.engine.close()


def late(name: str, prompt: list, deadline_s: float, *, max_tokens: int = 100) -> Request:
    asked = request(name, prompt, sampling=Sampling(max_tokens=max_tokens, temperature=0.0))
    return dataclasses.replace(asked, deadline_s=deadline_s)


def test_a_request_that_is_not_answered_in_time_ends_and_returns_everything():
    engine = TinyEngine(plan(max_num_seqs=1, max_num_batched_tokens=8))
    engine.submit(late("answering", [1, 2], 0.5))
    engine.submit(late("waiting", [picture(9), 3], 0.2))
    engine.submit(late("in time", [4], 2.0, max_tokens=5))
    engine.run()  # each step takes 0.01 s
    assert 40 <= len(engine.answer("answering")) <= 50
    assert engine.answer("waiting") == []
    for name, limit in (("answering", "0.5 s"), ("waiting", "0.2 s: 0 tokens")):
        assert isinstance(engine.last(name).error, DeadlineError)
        assert limit in engine.last(name).error.message
    assert engine.last("in time").finish is FinishReason.LENGTH
    assert engine.engine.stats().late == 2
    assert engine.is_clean()


def test_a_deadline_comes_even_while_the_engine_waits_for_a_slow_encoder():
    engine = TinyEngine()
    is_held = threading.Event()
    engine.encoder.fail_when = lambda pixels: not is_held.wait(5)
    engine.engine._clock = time.monotonic
    engine.engine.start()
    engine.submit(late("a", [picture(9)], 0.05))
    assert isinstance(ended(engine, "a", within_s=1.0).error, DeadlineError)
    is_held.set()
    engine.engine.close()
    assert engine.is_clean()


def test_texts_are_answered_while_a_picture_is_encoded():
    engine = TinyEngine()
    may_go = threading.Event()
    engine.encoder.fail_when = lambda pixels: not may_go.wait(5)
    engine.engine.start()
    shows, says = request("shows", [1, picture(9), 2]), request("says", [1, 2])
    engine.submit(shows)
    engine.submit(says)
    ended(engine, "says")
    assert engine.answer("says") == plain_answer(says, 8)
    assert engine.deltas["shows"] == []
    may_go.set()
    ended(engine, "shows")
    assert engine.answer("shows") == plain_answer(shows, 8)
    engine.engine.close()


def test_an_encoder_that_hangs_is_seen_although_texts_are_answered():
    engine = TinyEngine()
    engine.submit(request("a", [picture(9)]))
    engine.runner.encoder.begun_s = time.monotonic() - 300
    assert engine.engine.stats().since_progress_s >= 300


def test_an_id_under_way_is_refused_and_may_be_used_again_later():
    engine = TinyEngine()
    engine.engine.submit(request("a", [1, 2]), lambda delta: None)
    with pytest.raises(RequestError, match="'a' is under way"):
        engine.engine.submit(request("a", [3]), lambda delta: None)
    engine.run()
    ask(engine, {"a": [1, 2]})
    assert engine.is_clean()


def test_what_can_never_fit_is_refused_with_the_counts():
    engine = TinyEngine()
    with pytest.raises(ContextError, match=r"505 tokens \(4 of them for images\) and max_tokens is 8.*context of 512"):
        engine.submit(request("a", [*([1] * 501), picture(3)]))
    with pytest.raises(ContextError, match="no tokens"):
        engine.submit(request("b", []))


def test_a_full_queue_says_when_to_come_back():
    engine = TinyEngine(plan(max_num_queued=2, max_num_seqs=1))
    for name in "abc":
        engine.submit(request(name, [1]))
    with pytest.raises(OverloadError) as refused:
        engine.submit(request("d", [1]))
    assert refused.value.retry_after_s > 0


def test_an_end_token_stops_unless_it_is_to_be_ignored():
    engine = TinyEngine()
    sampling = {"max_tokens": 6, "temperature": 0.0, "logit_bias": {END_ID: 50.0}}
    engine.submit(request("a", [1], sampling=Sampling(**sampling)))
    engine.submit(request("b", [1], sampling=Sampling(**sampling, ignore_eos=True)))
    engine.submit(request("c", [1], sampling=Sampling(**sampling, min_tokens=3)))
    engine.run()
    assert (engine.answer("a"), engine.last("a").finish) == ([END_ID], FinishReason.STOP)
    assert (engine.answer("b"), engine.last("b").finish) == ([END_ID] * 6, FinishReason.LENGTH)
    assert END_ID not in engine.answer("c")[:3]
    assert engine.answer("c")[3:] == [END_ID]


def test_a_thousand_requests_a_third_aborted_leave_nothing_behind():
    engine = TinyEngine(plan(num_blocks=32, encoder_cache_bytes=200))
    generator = np.random.default_rng(0)
    for index in range(1000):
        prompt = [*generator.integers(0, 900, generator.integers(1, 60)).tolist(), picture(int(generator.integers(20)))]
        engine.submit(request(str(index), prompt))
        if index % 3 == 0:
            for _ in range(generator.integers(0, 4)):
                engine.engine.step()
            engine.engine.abort(str(index))
    engine.run()
    assert engine.is_clean()
    finished = engine.engine.stats().finished
    assert sum(finished.values()) == 1000
    assert finished["abort"] > 250


def test_progress_is_the_age_of_the_last_step_while_there_is_work():
    engine = TinyEngine()
    engine.clock.advance(100)
    assert engine.engine.stats().since_progress_s == 0
    engine.submit(request("a", [1]))
    assert engine.engine.stats().since_progress_s == 0
    engine.clock.advance(7)
    assert engine.engine.stats().since_progress_s == 7
    engine.run()
    assert engine.engine.stats().since_progress_s == 0


def test_the_engine_on_its_own_thread_answers_and_closes_with_everything_returned():
    engine = TinyEngine()
    engine.engine.start()
    done = threading.Event()
    asked = request("a", [1, picture(4), 2])
    answer: list[int] = []

    def deliver(delta):
        answer.extend(delta.token_ids)
        if delta.finish:
            done.set()

    engine.engine.submit(asked, deliver)
    assert done.wait(5)
    assert answer == plain_answer(asked, 8)
    engine.engine.submit(request("b", [1], sampling=Sampling(max_tokens=400, temperature=0.0)), deliver)
    engine.engine.close()
    assert engine.is_clean()
    with pytest.raises(BackendError, match="stopped"):
        engine.engine.submit(request("c", [1]), deliver)


@pytest.mark.parametrize(("num_seats", "begin"), [(8, "abcd"), (2, "ab")])
def test_those_who_come_together_begin_together_though_the_engine_rested(monkeypatch, num_seats: int, begin: str):
    engine, others = TinyEngine(plan(max_num_seqs=num_seats)), iter("bcd")

    def meanwhile(seconds: float) -> None:
        for name in itertools.islice(others, 1):
            engine.submit(request(name, [1, 2]))

    monkeypatch.setattr(time, "sleep", meanwhile)
    engine.submit(request("a", [1, 2]))
    engine.engine._rest()
    engine.engine.step()
    assert [one.request.id for one in engine.engine._scheduler.running] == list(begin)
    assert list(others) == list("bcd"[len(begin) - 1 :])
