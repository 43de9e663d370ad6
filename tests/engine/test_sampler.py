"""Logits to tokens, each setting held against its plain definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.request import Sampling
from triptych.engine.sampler import highest, sample
from triptych.engine.sequence import Sequence
from triptych.errors import RequestError
from triptych.testing import VOCAB, request


def sequence(prompt=(1, 2), answer=(), **sampling) -> Sequence:
    made = Sequence(
        request("a", list(prompt), sampling=Sampling(**({"max_tokens": 99} | sampling))), lambda d: None, now_s=0.0
    )
    for token in answer:
        made.commit(made.num_uncomputed)
        made.append(token, now_s=0.0)
    return made


def logits_of(seed: int, rows: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def drawn(logits, count=3000, **sampling) -> np.ndarray:
    """Relative frequencies of `count` draws."""
    tokens = [
        sample(logits, [sequence(seed=seed, **sampling)], eos_ids=frozenset())[0].token_id for seed in range(count)
    ]
    return np.bincount(tokens, minlength=VOCAB) / count


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def test_greedy_takes_the_most_likely():
    logits = logits_of(0, rows=5)
    chosen = sample(logits, [sequence(temperature=0.0) for _ in range(5)], eos_ids=frozenset())
    assert [choice.token_id for choice in chosen] == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("sampling", [{"temperature": 1e-50}, {"temperature": 1e-6}, {"temperature": 2.0, "top_k": 1}])
def test_the_coldest_draw_is_greedy_even_between_equals(sampling):
    logits = logits_of(0)
    logits[0, [7, 11, 500]] = logits.max() + 1
    assert {sample(logits, [sequence(**sampling)], eos_ids=frozenset())[0].token_id for _ in range(20)} == {7}


def test_an_end_token_that_has_no_logit_is_no_trouble():
    chosen = sample(logits_of(0), [sequence(min_tokens=3, stop_ids=frozenset({10**9}))], eos_ids=frozenset({VOCAB}))
    assert 0 <= chosen[0].token_id < VOCAB


@pytest.mark.parametrize(
    "setting",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"repetition_penalty": 1e-39},
     {"min_p": 1.1}, {"seed": -1}, {"num_logprobs": -1}, {"logit_bias": {3: float("inf")}}, {"logit_bias": {-1: 1.0}}],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_before_any_step(setting):
    with pytest.raises(RequestError, match=next(iter(setting))):
        Sampling(max_tokens=1, **setting)


def test_draws_follow_the_softmax_at_the_temperature():
    logits = logits_of(1)
    frequency = drawn(logits, temperature=0.7)
    assert np.abs(frequency - softmax(logits[0].astype(np.float64) / 0.7)).max() < 0.03  # 3 sigma of 3,000 draws


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 3}, lambda p: np.argsort(-p)[:3]),
        ({"top_k": 1}, lambda p: np.argsort(-p)[:1]),
        ({"min_p": 0.2}, lambda p: np.flatnonzero(p >= 0.2 * p.max())),
        ({"top_p": 0.6}, lambda p: np.argsort(-p)[: int((np.cumsum(np.sort(p)[::-1]) < 0.6).sum()) + 1]),
        ({"top_p": 1e-9}, lambda p: np.argsort(-p)[:1]),
    ],
)
def test_truncation_keeps_exactly_what_its_definition_keeps(sampling, kept):
    logits = logits_of(2)
    allowed = set(kept(softmax(logits[0].astype(np.float64))).tolist())
    frequency = drawn(logits, count=2000, **sampling)
    assert set(np.flatnonzero(frequency).tolist()) <= allowed
    likely = [i for i in allowed if softmax(logits[0])[i] / softmax(logits[0])[list(allowed)].sum() > 0.02]
    assert set(likely) <= set(np.flatnonzero(frequency).tolist())


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), temperature=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_row_never_depends_on_its_neighbours(seed, rows, temperature):
    logits = logits_of(seed % 1000, rows=rows)
    make = [lambda row=row: sequence(seed=seed + row, temperature=temperature, top_p=0.9) for row in range(rows)]
    together = sample(logits, [one() for one in make], eos_ids=frozenset())
    alone = [sample(logits[row : row + 1], [make[row]()], eos_ids=frozenset())[0] for row in range(rows)]
    assert together == alone


def test_penalties_are_those_of_openai_and_ctrl():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [5, 6, 7]] = [3.0, 2.9, -1.0]
    presence = sequence(answer=[5, 5], temperature=0.0, presence_penalty=0.2)
    assert sample(logits, [presence], eos_ids=frozenset())[0].token_id == 6
    frequency = sequence(answer=[5], temperature=0.0, frequency_penalty=0.06)
    assert sample(logits, [frequency], eos_ids=frozenset())[0].token_id == 5
    frequency = sequence(answer=[5, 5], temperature=0.0, frequency_penalty=0.06)
    assert sample(logits, [frequency], eos_ids=frozenset())[0].token_id == 6
    prompt_too = sequence(prompt=[5], temperature=0.0, repetition_penalty=1.1)
    assert sample(logits, [prompt_too], eos_ids=frozenset())[0].token_id == 6


def test_penalties_leave_the_logits_of_others_and_the_given_array_alone():
    logits = logits_of(3, rows=2)
    before = logits.copy()
    sample(
        logits,
        [sequence(answer=[5], presence_penalty=2.0, logit_bias={7: 100.0}), sequence()],
        eos_ids=frozenset({9}),
    )
    assert (logits == before).all()


def test_logit_bias_forces_and_forbids():
    logits = logits_of(4)
    assert sample(logits, [sequence(temperature=0.0, logit_bias={7: 100.0})], eos_ids=frozenset())[0].token_id == 7
    top = int(logits.argmax())
    banned = sample(logits, [sequence(temperature=0.0, logit_bias={top: -100.0})], eos_ids=frozenset())[0]
    assert banned.token_id == int(np.argsort(-logits[0])[1])


def test_logprobs_are_the_models_own_before_temperature_and_penalties():
    logits = logits_of(5)
    settings_ = {"temperature": 0.0, "num_logprobs": 4, "logit_bias": {3: 100.0}}
    choice = sample(logits, [sequence(**settings_)], eos_ids=frozenset())[0]
    expected = np.log(softmax(logits[0].astype(np.float64)))
    assert choice.token_id == 3
    assert choice.logprob.logprob == pytest.approx(expected[3], abs=1e-9)
    assert [token for token, _ in choice.logprob.top] == np.argsort(-expected)[:4].tolist()
    assert [value for _, value in choice.logprob.top] == pytest.approx(np.sort(expected)[::-1][:4], abs=1e-9)


@given(
    values=st.lists(st.one_of(st.floats(-9, 9, width=32), st.sampled_from([0.0, -np.inf])), min_size=1, max_size=400),
    share=st.floats(0, 1),
)
def test_the_highest_are_those_of_the_whole_sorted(values: list[float], share: float):
    values, count = np.array(values, np.float32), max(1, round(share * len(values) / 8))
    found = highest(values, count)
    assert len(set(found.tolist())) == count
    assert values[found].tolist() == np.sort(values)[::-1][:count].tolist()


def test_logprobs_of_no_alternatives_still_give_the_chosen_one():
    choice = sample(logits_of(6), [sequence(num_logprobs=0)], eos_ids=frozenset())[0]
    assert choice.logprob.top == ()
    assert choice.logprob.logprob < 0


def test_a_seed_gives_the_same_draws_and_another_seed_others():
    logits = logits_of(7, rows=1) / 3
    draws = [
        [sample(logits, [one], eos_ids=frozenset())[0].token_id for _ in range(20)]
        for one in (sequence(seed=1), sequence(seed=1), sequence(seed=2), sequence(), sequence())
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert draws[3] != draws[4]
