"""What is learnt from steps, and what follows for the next."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.engine.pace import LEAST_TOKENS, OUTLIER, STRETCH, Estimate, Pace


def learnt(*, answers_s: float = 0.02, token_s: float = 0.0005, num_answers: int = 4) -> Pace:
    pace = Pace()
    for _ in range(10):
        pace.saw_step(num_answers, 0, answers_s, is_alone=True)
        pace.saw_step(num_answers, 100, answers_s + 100 * token_s, is_alone=True)
    return pace


def test_nothing_is_held_back_before_anything_was_measured():
    assert Pace().prompt_tokens(4) is None
    assert (Pace().answers_s(4), Pace().prompt_token_s, Pace().tile_s) == (0, 0, 0)


def test_prompts_get_as_many_tokens_as_answers_can_bear():
    pace = learnt()
    assert pace.answers_s(4) == pytest.approx(0.02)
    assert pace.prompt_token_s == pytest.approx(0.0005)
    bearable = STRETCH * 0.02 / 0.0005
    assert bearable / 2 < pace.prompt_tokens(4) <= bearable


def test_where_nobody_answers_a_prompt_takes_the_whole_step():
    assert learnt().prompt_tokens(0) is None


def test_prompts_get_on_however_slow_they_are():
    assert learnt(token_s=1.0).prompt_tokens(4) == LEAST_TOKENS


def test_a_number_of_answers_never_seen_takes_as_long_as_the_nearest():
    pace = learnt()
    pace.saw_step(16, 0, 0.05, is_alone=True)
    assert pace.answers_s(3) == pytest.approx(0.02)
    assert pace.answers_s(30) == 0.05


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
