"""Forgetting, whole, over a model that answers by arithmetic on what each layer still has."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pages
from triptych.core.policy import KVPolicy
from triptych.core.request import FinishReason, Request, Sampling
from triptych.engine.evict import score
from triptych.engine.evict.choose import Context, choose, counts
from triptych.engine.evict.evictor import PLAIN, SLACK, queries_wanted
from triptych.engine.evict.layout import Deal
from triptych.errors import RequestError
from triptych.media.registry import modality_of
from triptych.testing import LayeredArithmetic, TinyEngine, layered_logits, picture, plain_context, plan, request

LAYERS = LayeredArithmetic.num_layers
DENSITY = (0.9, 0.1, 0.5)
METHODS = ["snapkv", "tova", "knorm", "window"]


def policy(**changed) -> KVPolicy:
    return KVPolicy(
        **({"method": "knorm", "budget": 0.4, "window": 8, "layer_density": DENSITY, "adaptive": 0.2} | changed)
    )


def forgetful(asked: Request, kv: KVPolicy, *, protected: int = 0) -> Request:
    return dataclasses.replace(asked, kv=kv, num_protected=protected)


def plain_answer(asked: Request, num_tokens: int) -> list[int]:
    """The slow twin: lists of tokens a layer, no pages, no blocks to move."""
    context, answer = plain_context(asked), []
    has = [np.arange(len(context)) for _ in range(LAYERS)]
    deal, kv = Deal.over(LAYERS, asked.kv.devices), asked.kv
    for at in range(num_tokens):
        answer.append(int(layered_logits([context[tokens] for tokens in has]).argmax()))
        ids = np.concatenate([asked.token_ids, np.array(answer[:-1], np.int32)])
        facts = Context(policy=kv, modality=modality_of(ids), num_protected=asked.num_protected)
        lengths = np.array([len(tokens) for tokens in has])
        most = np.minimum(counts(facts, LAYERS), lengths)
        if (lengths - most).mean() >= SLACK and deal.num_blocks(most) < deal.num_blocks(lengths):
            for layer in range(LAYERS):
                rows = context[has[layer], :2].astype(np.float32)[None]
                asking = rows[0, -queries_wanted(kv) or len(rows[0]) :, None]
                view = score.LayerView(layer=layer, keys=rows, values=rows, position=0, queries=asking)
                has[layer] = has[layer][choose(PLAIN[kv.method](view), has[layer], facts, int(most[layer]))]
        context = np.concatenate([context, [[answer[-1], 0, asked.num_positions + at]]])
        has = [np.append(tokens, len(context) - 1) for tokens in has]
    return answer


def run(engine: TinyEngine, *requests: Request) -> None:
    for asked in requests:
        engine.submit(asked)
    engine.run()


def answers(num_tokens: int) -> Sampling:
    return Sampling(max_tokens=num_tokens, temperature=0.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("devices", [(), ("near", "far", "near")])
def test_a_long_prompt_is_forgotten_as_its_plain_twin_forgets_it(method, devices):
    kv = policy(method=method, devices=devices, floors={"image": 0.5})
    asked = forgetful(
        request("a", [*range(90), picture(60, num_tiles=8), *range(40)], sampling=answers(120)), kv, protected=5
    )
    engine = TinyEngine(forgetting=kv)
    run(engine, asked)
    assert engine.answer("a") == plain_answer(asked, 120)
    assert engine.engine.stats().compactions > 1
    assert engine.engine.stats().evicted_tokens > 60
    assert engine.is_clean()


def test_forgetting_gives_whole_blocks_back():
    kv = policy(budget=0.25)
    engine = TinyEngine(forgetting=kv)
    engine.submit(forgetful(request("a", list(range(256)), sampling=answers(40)), kv))
    for _ in range(4):
        engine.engine.step()
    assert engine.engine.stats().free_blocks == 64 - 3  # 64 tokens a layer in the mean, of 256, on pages of 32


def test_rows_that_cannot_be_moved_end_their_own_request():
    def fail(sources, targets):
        raise RuntimeError("told to fail")

    kv = policy(budget=0.25)
    engine, other = TinyEngine(forgetting=kv), request("b", [1, 2])
    engine.decoder.move = fail
    run(engine, forgetful(request("a", list(range(256)), sampling=answers(40)), kv), other)
    assert (engine.last("a").finish, engine.last("b").finish) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert engine.is_clean()


def test_a_budget_of_all_changes_nothing():
    asked = request("a", [*range(100), picture(9), 5], sampling=answers(80))
    plain, whole = TinyEngine(forgetting=policy()), TinyEngine(forgetting=policy())
    run(plain, asked)
    run(whole, forgetful(asked, policy(budget=1.0)))
    assert plain.answer("a") == whole.answer("a")
    assert whole.engine.stats().compactions == 0


def test_a_short_prompt_keeps_everything():
    kv = policy()
    engine = TinyEngine(forgetting=kv)
    run(engine, forgetful(request("a", list(range(40))), kv))
    assert engine.engine.stats().compactions == 0


def test_a_prefix_is_found_whole_after_its_first_owner_forgot_it():
    kv = policy()
    engine = TinyEngine(forgetting=kv)
    first, second = (forgetful(request(name, list(range(200)), sampling=answers(50)), kv) for name in ("a", "b"))
    run(engine, first)
    run(engine, second)
    assert engine.last("b").usage.cached_tokens == 192
    assert engine.answer("b") == engine.answer("a") == plain_answer(first, 50)


def test_a_method_that_asks_the_last_tokens_finds_them_computed_after_a_prefix_hit():
    kv = policy(method="snapkv", window=20)
    engine = TinyEngine(forgetting=kv)
    first, second = (forgetful(request(name, list(range(200)), sampling=answers(50)), kv) for name in ("a", "b"))
    run(engine, first)
    run(engine, second)
    assert engine.last("b").usage.cached_tokens == 160, "192 would leave 8 of the 16 that are asked"
    assert engine.answer("b") == engine.answer("a") == plain_answer(first, 50)


def test_nobody_elses_prefix_is_touched():
    kv = policy()
    engine = TinyEngine(forgetting=kv)
    prompt = list(range(200))
    keeps = request("keeps", [*prompt, 7], sampling=answers(60))
    engine.submit(keeps)
    for _ in range(5):
        engine.engine.step()
    run(engine, forgetful(request("forgets", prompt, sampling=answers(60)), kv))
    everything = [plain_context(keeps)] * LAYERS
    assert engine.answer("keeps")[0] == int(layered_logits(everything).argmax())
    alone = TinyEngine(forgetting=kv)
    run(alone, keeps)
    assert engine.answer("keeps") == alone.answer("keeps")
    assert engine.last("forgets").usage.cached_tokens == 192


def test_what_has_forgotten_is_never_found_by_prefix():
    kv = policy()
    engine = TinyEngine(forgetting=kv)
    first = forgetful(request("a", list(range(100)), sampling=answers(100)), kv)
    run(engine, first)
    run(engine, request("b", [*range(100), *engine.answer("a")]))
    assert engine.last("b").usage.cached_tokens == 96


def test_a_preempted_sequence_is_computed_and_forgotten_anew():
    kv = policy(budget=0.5)
    engine = TinyEngine(plan(num_blocks=9, max_model_len=288, max_num_seqs=4), forgetting=kv)
    asked = [forgetful(request(str(i), [i] * 100, sampling=answers(150)), kv) for i in range(4)]
    run(engine, *asked)
    stats = engine.engine.stats()
    assert stats.preemptions > 0
    assert stats.compactions > 4
    assert engine.answer("0") == plain_answer(asked[0], 150), "the first in rank is never preempted"
    assert all(len(engine.answer(one.id)) == 150 for one in asked)
    assert engine.is_clean()


def test_abort_and_a_failed_step_give_everything_back():
    kv = policy()
    engine = TinyEngine(forgetting=kv)
    for name in "ab":
        engine.submit(forgetful(request(name, list(range(150)), sampling=answers(200)), kv))
    for _ in range(20):
        engine.engine.step()
    assert engine.engine.stats().compactions > 0
    engine.engine.abort("a")
    engine.engine.step()
    engine.decoder.fail_when = lambda arrays: True
    engine.run()
    assert engine.last("a").finish is FinishReason.ABORT
    assert engine.last("b").finish is FinishReason.ERROR
    assert engine.is_clean()


def test_a_request_that_forgets_otherwise_is_refused():
    kv = policy(method="window")
    with pytest.raises(RequestError, match="keeps every key"):
        TinyEngine().submit(forgetful(request("a", [1]), kv))
    with pytest.raises(RequestError, match="'knorm'"):
        TinyEngine(forgetting=policy()).submit(forgetful(request("a", [1]), kv))


parts = st.one_of(st.integers(0, 900), st.builds(picture, st.sampled_from([40, 80]), num_tiles=st.integers(1, 9)))


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(parts, min_size=1, max_size=60), st.sampled_from([1, 3]), st.sampled_from([None, 0.2, 0.6])),
        min_size=1,
        max_size=4,
    ),
    chunk=st.integers(8, 64),
    num_blocks=st.integers(16, 40),
    share=st.booleans(),
    devices=st.sampled_from([(), ("near", "far", "far")]),
    method=st.sampled_from(METHODS),
)
def test_any_mixture_forgets_as_its_twins_do_and_leaves_nothing_behind(
    prompts, chunk, num_blocks, share, devices, method
):
    kv = policy(method=method, devices=devices)
    facts = {"max_num_batched_tokens": chunk, "num_blocks": num_blocks, "share_prefixes": share}
    engine = TinyEngine(plan(**facts), forgetting=kv)
    requests = []
    for index, (prompt, times, budget) in enumerate(prompts):
        asked = request(str(index), (prompt * times)[:200], sampling=answers(50))
        if len(asked.token_ids) > 400:
            continue
        requests.append(forgetful(asked, policy(method=method, devices=devices, budget=budget or 1.0)))
    for asked in requests:
        engine.submit(asked)
    while engine.engine.step():
        pages.check(engine.engine._blocks)
        held = [block for one in engine.engine._scheduler.running for block in one.blocks]
        used = engine.engine.stats().num_blocks - engine.engine.stats().free_blocks
        assert len(set(held)) == used
        for one in engine.engine._scheduler.running:
            assert len(one.blocks) >= one.blocks_for(one.num_computed)
    if engine.engine.stats().preemptions == 0:
        for asked in requests:
            assert engine.answer(asked.id) == plain_answer(asked, 50)
    assert engine.is_clean()
