"""How likely each prompt token was, held against the plain model token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sick import sicken
from triptych.core.request import FinishReason, Request, Sampling, TokenLogprob
from triptych.engine.sampler import logprob
from triptych.media.registry import IMAGE_BASE
from triptych.testing import TinyEngine, _checksum, _logits, picture, plain_answer, plain_context, plan, request

parts = st.lists(
    st.one_of(st.integers(0, 900), st.builds(picture, st.sampled_from([40, 80]), num_tiles=st.integers(1, 3))),
    min_size=1,
    max_size=30,
)


def sampling(count: int | None = 2, **changes) -> Sampling:
    return Sampling(**({"max_tokens": 4, "temperature": 0.0, "num_prompt_logprobs": count} | changes))


def plain(asked: Request, count: int) -> list[TokenLogprob | None]:
    """What must be told of the prompt: each text token by the logits after all before it, at once and uncached."""
    context = plain_context(asked)
    told: list[TokenLogprob | None] = [None]
    for at, token in enumerate(asked.token_ids[1:].tolist(), start=1):
        told.append(None if token >= IMAGE_BASE else logprob(_logits(_checksum(context[:at])), token, count))
    return told


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(parts, min_size=1, max_size=5), chunk=st.integers(8, 40), count=st.integers(0, 3), data=st.data()
)
def test_prompts_are_scored_as_the_plain_model_does_in_any_mixture(prompts, chunk, count, data):
    engine = TinyEngine(plan(max_num_batched_tokens=chunk, num_blocks=20))
    requests = [
        request(str(at), prompt, sampling=sampling(data.draw(st.sampled_from([None, count]))))
        for at, prompt in enumerate(prompts)
    ]
    for asked in requests:
        engine.submit(asked)
    engine.run()
    for asked in requests:
        first, *later = engine.deltas[asked.id]
        wanted = asked.sampling.num_prompt_logprobs
        assert first.prompt_logprobs == (None if wanted is None else tuple(plain(asked, count)))
        assert all(delta.prompt_logprobs is None for delta in later)
        assert engine.answer(asked.id) == plain_answer(asked, 4)
    assert engine.is_clean()


def test_a_cached_prefix_hides_no_probabilities():
    engine = TinyEngine()
    prompt = [*range(100), picture(5), 3]
    for name, count in (("a", None), ("b", 1), ("c", None)):
        engine.submit(request(name, prompt, sampling=sampling(count)))
        engine.run()
    assert engine.deltas["b"][0].prompt_logprobs == tuple(plain(request("b", prompt), 1))
    assert [engine.last(name).usage.cached_tokens for name in "abc"] == [0, 0, 96]


def test_a_preempted_prompt_is_scored_once_and_wholly():
    engine = TinyEngine(plan(num_blocks=8, max_model_len=256, max_num_seqs=4))
    requests = [request(str(at), [at] * 20, sampling=sampling(0, max_tokens=100)) for at in range(4)]
    for asked in requests:
        engine.submit(asked)
    engine.run()
    assert engine.engine.stats().preemptions > 0
    for asked in requests:
        given = [delta.prompt_logprobs for delta in engine.deltas[asked.id] if delta.prompt_logprobs is not None]
        assert given == [tuple(plain(asked, 0))]


def test_an_answer_of_one_token_brings_the_prompt_with_it():
    engine = TinyEngine()
    asked = request("a", [1, 2, 3], sampling=sampling(0, max_tokens=1))
    engine.submit(asked)
    engine.run()
    (only,) = engine.deltas["a"]
    assert only.finish is FinishReason.LENGTH
    assert only.prompt_logprobs == tuple(plain(asked, 0))


@pytest.mark.parametrize("chunk", [8, 64])
def test_logits_that_are_no_numbers_in_mid_prompt_fail_that_request_alone(chunk: int):
    engine = TinyEngine(plan(max_num_batched_tokens=chunk))
    sicken(engine, after=13)
    good = request("good", [1, 2, 3], sampling=sampling(1))
    engine.submit(request("bad", [1, 13, *range(100, 120)], sampling=sampling(1)))
    engine.submit(good)
    engine.run()
    assert engine.last("bad").finish is FinishReason.ERROR
    assert engine.answer("good") == plain_answer(good, 4)
    assert engine.engine.stats().corrupted == 1
    assert engine.is_clean()
