"""What is learnt from steps, and what follows for the next."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.device import CostPoint, StepCost
from triptych.core.filling import COARSE, FINE, LEAST_TOKENS, STRETCH, size_of
from triptych.engine.config import EngineConfig
from triptych.engine.pace import OUTLIER, Estimate, Pace
from triptych.errors import ConfigError


def learnt(*, answers_s: float = 0.02, token_s: float = 0.0005, num_answers: int = 4, stretch: float = STRETCH) -> Pace:
    """Of steps that take so long and so much more for each token besides."""
    pace = Pace(stretch)
    for _ in range(2):
        pace.saw_step(num_answers, 0, answers_s, is_alone=True)
    for _ in range(10):
        for tokens in (8, 12, 28, 100):
            pace.saw_step(num_answers, tokens, answers_s + tokens * token_s, is_alone=True)
    return pace


def test_nothing_is_held_back_before_anything_was_measured():
    assert Pace().prompt_tokens(4) is None
    assert (Pace().answers_s(4), Pace().prompt_token_s, Pace().tile_s) == (0, 0, 0)


def test_prompts_get_as_many_tokens_as_answers_can_bear():
    pace = learnt()
    assert pace.answers_s(4) == pytest.approx(0.02)
    assert pace.prompt_token_s == pytest.approx(0.0005, rel=0.1)
    bearable = STRETCH * 0.02 / 0.0005
    assert bearable - FINE <= pace.prompt_tokens(4) <= bearable


def test_an_operator_says_how_much_answers_bear():
    bearable = 2.0 * 0.02 / 0.0005
    assert bearable - COARSE <= learnt(stretch=2.0).prompt_tokens(4) <= bearable
    assert learnt(stretch=0.0).prompt_tokens(4) == LEAST_TOKENS
    assert learnt(stretch=math.inf).prompt_tokens(4) is None


@pytest.mark.parametrize("stretch", [-0.1, math.nan])
def test_a_stretch_that_is_none_is_refused(stretch):
    with pytest.raises(ConfigError, match="--prompt-stretch"):
        EngineConfig(prompt_stretch=stretch)


def test_tokens_that_cost_nothing_are_taken_all():
    """Reading the weights is what a small step's time goes for: it takes as long for thirty tokens as for four."""
    pace = Pace()
    for _ in range(4):
        pace.saw_step(4, 0, 0.0200, is_alone=True)
        pace.saw_step(4, 28, 0.0201, is_alone=True)
        pace.saw_step(4, 92, 0.0800, is_alone=True)
    assert 28 <= pace.prompt_tokens(4) < 60


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.floats(1e-3, 1.0), st.floats(1e-6, 1e-1))
def test_a_step_that_prompts_fill_has_one_of_few_numbers_of_tokens(num_answers, answers_s, token_s):
    tokens = learnt(answers_s=answers_s, token_s=token_s).prompt_tokens(num_answers)
    assert tokens == LEAST_TOKENS or size_of(num_answers + tokens) == num_answers + tokens


def test_where_nobody_answers_a_prompt_takes_the_whole_step():
    assert learnt().prompt_tokens(0) is None


def test_prompts_get_on_however_slow_they_are():
    assert learnt(token_s=1.0).prompt_tokens(4) == LEAST_TOKENS


def test_a_number_of_answers_never_seen_takes_as_long_as_a_step_of_as_many_tokens():
    pace = learnt()
    assert pace.answers_s(32) == pytest.approx(0.02 + 28 * 0.0005)
    assert pace.answers_s(22) == pytest.approx(0.02 + 18 * 0.0005)
    assert 0.01 < pace.answers_s(1) < 0.02
    assert pace.answers_s(1000) > pace.answers_s(104)


def test_a_step_takes_no_longer_than_a_larger_one():
    """What was once seen on a bad day is known better from what is seen every day."""
    pace = learnt()
    for _ in range(2):
        pace.saw_step(7, 0, 9.0, is_alone=True)
    assert pace.answers_s(7) <= 0.02 + 8 * 0.0005


def test_what_was_seen_once_is_not_believed():
    """The first step of a shape compiles it; a server that had to wait for a processor took 17 s for it."""
    pace = Pace()
    pace.saw_step(0, 66, 17.0, is_alone=True)
    assert (pace.answers_s(32), pace.prompt_token_s, pace.prompt_tokens(1)) == (0, 0, None)
    for _ in range(3):
        pace.saw_step(0, 66, 0.05, is_alone=True)
    assert pace.prompt_token_s < 0.001
    assert pace.answers_s(32) < 0.05


def test_a_picture_takes_no_time_before_two_were_seen():
    pace = Pace()
    pace.saw_tiles(1, 9.0)
    assert pace.tile_s == 0


def test_what_was_measured_before_is_where_it_begins():
    def points(*pairs: tuple[float, float]) -> tuple[CostPoint, ...]:
        return tuple(CostPoint(size=size, seconds=s, lowest_s=s, highest_s=s) for size, s in pairs)

    cost = StepCost(
        device="here", weights_digest="", settings="", cached_token_s=0.0, error=0.01, tiles=points((1, 0.25)),
        decode=points((1, 0.012), (8, 0.016)), prefill=points((8, 0.006), (128, 0.064)),
    )  # fmt: skip
    pace = Pace()
    pace.assume(cost)
    assert (pace.answers_s(1), pace.answers_s(8)) == (0.012, 0.016)
    assert (pace.prompt_token_s, pace.tile_s) == (0.0005, 0.25)
    assert LEAST_TOKENS <= pace.prompt_tokens(4) < 32
    for _ in range(100):
        pace.saw_step(8, 0, 0.032, is_alone=True)
        pace.saw_step(1, 8, 0.036, is_alone=True)
    assert pace.answers_s(8) == pytest.approx(0.032, rel=0.05), "a slower day"


def test_steps_beside_the_encoder_are_no_measure_of_answers_alone():
    pace = learnt()
    for _ in range(50):
        pace.saw_step(4, 0, 0.04, is_alone=False)
    assert pace.answers_s(4) == pytest.approx(0.02)


def test_one_step_that_took_for_ever_is_soon_forgotten():
    pace = learnt()
    pace.saw_step(4, 0, 60.0, is_alone=True)
    assert pace.answers_s(4) < 0.025


def test_the_short_rests_of_cached_prompts_do_not_make_a_token_dear():
    pace = learnt(num_answers=1)
    for _ in range(50):
        pace.saw_step(0, 2, 0.021, is_alone=True)
    assert pace.prompt_token_s == pytest.approx(0.0005, rel=0.1), "what every step takes is no token's"


def test_many_tokens_say_more_than_a_few():
    pace = learnt()
    pace.saw_step(4, 1, 0.02 + 0.0015, is_alone=True)
    assert pace.prompt_token_s == pytest.approx(0.0005, rel=0.01)


def test_a_picture_is_learnt_by_its_tiles():
    pace = Pace()
    for _ in range(2):
        pace.saw_tiles(4, 2.0)
    assert pace.tile_s == 0.5


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_an_estimate_stays_within_what_was_seen(values):
    estimate = Estimate()
    for value in values:
        estimate.see(value)
    assert min(values) * 0.999 <= estimate.value <= max(values) * 1.001


@settings(deadline=None)
@given(st.floats(1e-3, 1e3))
def test_an_estimate_follows_a_change(level):
    estimate = Estimate()
    for value in [1.0] * 50 + [level] * 300:
        estimate.see(value)
    assert estimate.value == pytest.approx(level, rel=0.01)
    assert OUTLIER > 1


def test_a_size_may_be_seen_first_while_another_thread_looks():
    pace = learnt()

    class Slow(Estimate):
        """Takes so long to be read that a step of another size ends meanwhile."""

        @property
        def count(self) -> int:
            pace.saw_step(200, 0, 1.0, is_alone=True)
            return 10

        @count.setter
        def count(self, value: int) -> None: ...

    pace._steps[4] = Slow(0.02, 10)
    assert pace.answers_s(4) == pytest.approx(0.02)
    assert 208 in pace._steps
