"""Guesses from an answer's own text: what is guessed, that answers are the same with them, and when they are made."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pages
from triptych.core.policy import Speculation
from triptych.core.request import Delta, Request, Sampling
from triptych.engine.config import EngineConfig
from triptych.engine.draft import Drafter, look_up
from triptych.engine.pace import Pace
from triptych.engine.sequence import Luck, Sequence
from triptych.errors import ConfigError
from triptych.media.registry import IMAGE_BASE
from triptych.testing import TinyEngine, picture, plan, request

NGRAM = Speculation()


def guessed(tokens: list[int], most: int = 4) -> list[int]:
    return look_up(np.array(tokens, np.int32), most, NGRAM).tolist()


def test_what_followed_the_same_tokens_before_is_guessed():
    assert guessed([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]
    assert guessed([1, 2, 3, 9, 1, 2, 4, 9, 1, 2]) == [4, 9, 1, 2], "of two places, the latest"
    assert guessed([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2]) == [3, 9, 1, 2], "but rather the one with more in common"
    assert guessed([1, 2, 3, 4]) == []
    assert guessed([5, 1, 5]) == [], "one token in common is too little"
    assert guessed([5]) == []


def test_a_loop_is_guessed_to_go_on():
    assert guessed([8, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert guessed([6, 6, 6], 3) == [6, 6, 6]


def test_rows_of_pictures_are_never_guessed():
    assert guessed([1, 2, 3, IMAGE_BASE, 4, 1, 2]) == [3]


def test_luck_is_what_came_of_late():
    luck = Luck()
    for _ in range(50):
        luck.see(True)
    assert luck.expected(7) > 6
    for _ in range(20):
        luck.see(False)
    assert luck.expected(7) < 0.6


def answering(max_tokens: int = 100) -> Sequence:
    asked = request("a", [1, 2, 3, 4, 1, 2, 3], sampling=Sampling(max_tokens=max_tokens, temperature=0.0))
    made = Sequence(asked, lambda delta: None, now_s=0.0)
    made.commit(7)
    made.append(4, now_s=0.0)
    return made


def drafter(*, row_s: float, lucky: bool = True) -> tuple[Drafter, Sequence]:
    pace = Pace()
    for _ in range(4):
        pace.saw_step(1, 0, 0.01, is_alone=True)
    made, one = Drafter(NGRAM, pace), answering()
    for _ in range(4):
        made.saw(1, 10, 0.01 + 10 * row_s, is_alone=True)
    for _ in range(30):
        one.luck.see(lucky)
    return made, one


def test_as_much_is_guessed_as_pays():
    cheap, lucky = drafter(row_s=0.0002)
    assert cheap.sizes([lucky], room=100) == [15]
    assert cheap.sizes([lucky], room=10) == [7]
    dear, lucky = drafter(row_s=0.011)
    assert dear.sizes([lucky], room=100) == [0]
    cheap, unlucky = drafter(row_s=0.0002, lucky=False)
    assert cheap.sizes([unlucky], room=100)[0] <= 3


def test_nothing_is_guessed_behind_an_answers_end_or_before_a_step_was_measured():
    cheap, lucky = drafter(row_s=0.0)
    short = answering(max_tokens=5)
    short.luck = lucky.luck
    assert cheap.sizes([short], room=100) == [3]
    assert Drafter(NGRAM, Pace()).sizes([answering()], room=100) == [0]


def test_before_a_guessed_row_was_measured_only_luck_guesses():
    pace, one = Pace(), answering()
    for _ in range(4):
        pace.saw_step(1, 0, 0.01, is_alone=True)
    assert Drafter(NGRAM, pace).sizes([one], room=100) == [0]
    for _ in range(6):
        one.luck.see(True)
    assert Drafter(NGRAM, pace).sizes([one], room=100) == [3]


def test_a_large_batch_guesses_nothing():
    cheap, lucky = drafter(row_s=0.0)
    assert cheap.sizes([lucky] * 32, room=1000) == [0] * 32


# ── answers are the same ───────────────────────────────────────────────────────────────────────────────────────


class Eager(Drafter):
    """Guesses as much as it can, whatever it costs."""

    def _best(self, rates):
        return max(rates)


def engine(speculation: Speculation | None, **changes: float) -> TinyEngine:
    made = TinyEngine(dataclasses.replace(plan(**changes), speculation=speculation))
    if speculation is not None:
        for _ in range(4):
            made.engine.pace.saw_step(1, 0, 0.01, is_alone=True)
        made.engine._drafter = made.engine._scheduler._drafter = Eager(speculation, made.engine.pace)
    return made


def told(held: TinyEngine, asked: list[Request]) -> dict[str, list[tuple]]:
    for one in asked:
        held.submit(one)
    held.run()

    def facts(delta: Delta) -> tuple:
        return delta.token_ids, delta.logprobs, delta.finish, delta.usage and delta.usage.completion_tokens

    return {one.id: [facts(delta) for delta in held.deltas[one.id]] for one in asked}


samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.3, 1.5]),
    seed=st.integers(0, 3),
    top_k=st.sampled_from([None, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {5: 20.0}, {5: 9.0, 6: 9.0}]),
    num_logprobs=st.sampled_from([None, 2]),
    stop_ids=st.sampled_from([frozenset(), frozenset({6})]),
    min_tokens=st.sampled_from([0, 3]),
)
prompts = st.lists(st.one_of(st.integers(0, 6), st.builds(picture, st.integers(0, 3))), min_size=1, max_size=50)


@settings(max_examples=15, deadline=None)
@given(
    asked=st.lists(st.tuples(prompts, samplings), min_size=1, max_size=4),
    most=st.sampled_from([1, 3, 15]),
    num_blocks=st.sampled_from([17, 64]),
    batch_invariant=st.booleans(),
)
def test_answers_are_the_same_with_guesses_and_without(asked, most, num_blocks, batch_invariant):
    requests = [request(str(at), prompt, sampling=sampling) for at, (prompt, sampling) in enumerate(asked)]
    facts = {"num_blocks": num_blocks, "batch_invariant": batch_invariant}
    plain = engine(None, **facts)
    fast = engine(Speculation(num_speculative_tokens=most, prompt_lookup_min=1), **facts)
    assert told(fast, requests) == told(plain, requests)
    assert plain.engine.stats().drafted_tokens == 0
    assert fast.is_clean()
    pages.check(fast.engine._blocks)


def test_a_repeating_answer_takes_fewer_steps_and_says_so():
    asked = request("a", [1, 2], sampling=Sampling(max_tokens=200, temperature=0.0, logit_bias={5: 99.0}))
    plain, fast = engine(None), engine(NGRAM)
    assert told(fast, [asked]) == told(plain, [asked])
    stats, slow = fast.engine.stats(), plain.engine.stats()
    assert stats.steps < slow.steps / 4
    assert stats.accepted_tokens == slow.steps - stats.steps
    assert stats.drafts < stats.steps
    assert stats.drafted_tokens >= stats.accepted_tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "eagle"},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 32},
        {"prompt_lookup_min": 5},
        {"prompt_lookup_min": 0},
    ],
)
def test_what_cannot_be_guessed_by_is_refused(changes):
    with pytest.raises(ConfigError):
        Speculation(**changes)


def test_a_cache_that_forgets_takes_no_guesses_back():
    with pytest.raises(ConfigError, match="forgets"):
        EngineConfig(speculation=NGRAM, kv_budget=0.5)
