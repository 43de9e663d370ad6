"""A guide holds its own row to a form: next to others, among penalties, through preemption, to its last token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from triptych.core.request import FinishReason, Sampling
from triptych.errors import RequestError
from triptych.testing import END_ID, VOCAB, TinyEngine, picture, plan, request


@dataclasses.dataclass(frozen=True)
class Cycle:
    """A form without text: these tokens over and over, and an end where told."""

    tokens: tuple[int, ...]
    length: int = 10**9
    breaks_at: int = 10**9
    num_least: int | None = None

    def start(self) -> CycleMatcher:
        return CycleMatcher(self)


class CycleMatcher:
    def __init__(self, form: Cycle) -> None:
        self._form = form
        self.taken: list[int] = []
        self.rooms: list[int] = []

    def allowed(self) -> np.ndarray:
        at = len(self.taken)
        if at == self._form.breaks_at:
            raise RequestError("too complex")
        mask = np.zeros(VOCAB, np.bool_)
        mask[END_ID if at >= self._form.length else self._form.tokens[at % len(self._form.tokens)]] = True
        return mask

    def take(self, token_id: int, *, room: int) -> int:
        assert self.allowed()[token_id]
        self.taken.append(token_id)
        self.rooms.append(room)
        return token_id


def guided(guide: Cycle, **settings) -> Sampling:
    return Sampling(**({"max_tokens": 8, "temperature": 0.0, "guide": guide} | settings))


def answers(engine: TinyEngine, **asked: Sampling) -> dict[str, list[int]]:
    for name, sampling in asked.items():
        engine.submit(request(name, [1, 2, 3], sampling=sampling))
    engine.run()
    return {name: engine.answer(name) for name in asked}


def test_an_answer_has_the_form_and_ends_where_it_does():
    engine = TinyEngine()
    assert answers(engine, a=guided(Cycle((5, 6), length=3))) == {"a": [5, 6, 5, END_ID]}
    assert engine.last("a").finish is FinishReason.STOP
    assert engine.is_clean()


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_guide_does_not_touch_its_neighbours(temperature):
    free = Sampling(max_tokens=8, temperature=temperature, seed=4)
    alone = answers(TinyEngine(), free=free)["free"]
    together = answers(TinyEngine(), free=free, held=guided(Cycle((5, 6)), temperature=temperature, seed=1))
    assert together == {"free": alone, "held": [5, 6] * 4}


def test_each_of_several_answers_follows_the_form_from_its_beginning():
    guide = Cycle((5, 6, 7), length=4)
    asked = {name: guided(guide, temperature=1.0, seed=seed) for seed, name in enumerate("abc")}
    assert set(map(tuple, answers(TinyEngine(), **asked).values())) == {(5, 6, 7, 5, END_ID)}


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": {9: 100.0, 5: -100.0}},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 2.0, "top_k": 3, "seed": 1},
        {"temperature": 2.0, "top_p": 0.1, "min_p": 0.5, "seed": 1},
    ],
)
def test_no_other_setting_breaks_the_form(settings):
    assert answers(TinyEngine(), a=guided(Cycle((5, 6)), **settings))["a"] == [5, 6] * 4


def test_the_form_outranks_a_minimum_of_tokens():
    assert answers(TinyEngine(), a=guided(Cycle((5,), length=2), min_tokens=6))["a"] == [5, 5, END_ID]


def test_a_minimum_holds_where_the_form_allows_more():
    class Optional(Cycle):
        def start(self) -> CycleMatcher:
            matcher = super().start()
            before = matcher.allowed
            matcher.allowed = lambda: before() | (np.arange(VOCAB) == END_ID)
            return matcher

    guide = Optional((5, 6))
    favoured = {END_ID: 100.0}
    assert answers(TinyEngine(), a=guided(guide, logit_bias=favoured))["a"] == [END_ID]
    assert answers(TinyEngine(), a=guided(guide, logit_bias=favoured, min_tokens=3))["a"] == [5, 6, 5, END_ID]


def test_a_guide_that_cannot_go_on_fails_its_own_answer_alone():
    engine = TinyEngine()
    asked = {"held": guided(Cycle((5,), breaks_at=3)), "free": Sampling(max_tokens=8, temperature=0.0)}
    alone = answers(TinyEngine(), free=asked["free"])["free"]
    assert answers(engine, **asked) == {"held": [5, 5, 5], "free": alone}
    assert isinstance(engine.last("held").error, RequestError)
    assert engine.is_clean()


def test_a_preempted_answer_goes_on_where_it_was():
    engine = TinyEngine(plan(num_blocks=4, share_prefixes=False))
    for name in "abc":
        sampling = guided(Cycle(tuple(range(10, 70))), max_tokens=60)
        engine.submit(request(name, [ord(name), picture(9), 2, 3], sampling=sampling))
    engine.run()
    assert engine.engine.stats().preemptions > 0
    for name in "abc":
        assert engine.answer(name) == list(range(10, 70))


def test_a_matcher_is_told_how_many_tokens_may_follow():
    matchers = []

    class Watched(Cycle):
        def start(self) -> CycleMatcher:
            matchers.append(super().start())
            return matchers[-1]

    answers(TinyEngine(), a=guided(Watched((5,)), max_tokens=4))
    assert matchers[0].rooms == [3, 2, 1, 0]


def test_probabilities_are_the_models_own():
    plain, held = TinyEngine(), TinyEngine()
    answers(plain, a=Sampling(max_tokens=1, temperature=0.0, num_logprobs=2))
    answers(held, a=guided(Cycle((5,)), max_tokens=1, num_logprobs=2))
    first, other = plain.deltas["a"][0].logprobs[0], held.deltas["a"][0].logprobs[0]
    assert other.top == first.top
    assert other.token_id == 5
    assert other.logprob < first.logprob
