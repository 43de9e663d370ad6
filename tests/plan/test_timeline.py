"""The engine's schedule, played with made-up times."""

from __future__ import annotations

import pytest

from triptych.plan.timeline import Ask, Costs, Rules, play
from triptych.plan.work import Step


def second_a_step(step: Step) -> float:
    return 1.0


def test_one_request_is_its_prompts_step_and_one_for_each_further_token() -> None:
    (told,) = play([Ask(prompt_tokens=100, answer_tokens=11)], Costs(step_s=second_a_step), Rules(), callers=1)

    assert (told.ttft_s, told.tpot_s, told.done_s) == (1.0, 1.0, 11.0)


def test_a_long_prompt_takes_as_many_steps_as_it_fills() -> None:
    (told,) = play([Ask(prompt_tokens=1200, answer_tokens=1)], Costs(step_s=second_a_step), Rules(), callers=1)

    assert told.ttft_s == 3.0


def test_requests_that_fit_one_step_begin_together() -> None:
    told = play([Ask(prompt_tokens=100, answer_tokens=4)] * 5, Costs(step_s=second_a_step), Rules(), callers=5)

    assert {one.ttft_s for one in told} == {1.0}
    assert {one.done_s for one in told} == {4.0}


def test_a_caller_asks_again_when_it_was_answered() -> None:
    told = play([Ask(prompt_tokens=8, answer_tokens=2)] * 4, Costs(step_s=second_a_step), Rules(), callers=2)

    assert [one.asked_s for one in told] == [0.0, 0.0, 2.0, 2.0]


def test_open_arrivals_come_when_they_are_due() -> None:
    asks = [Ask(prompt_tokens=8, answer_tokens=1, at_s=at) for at in (0.0, 10.0)]

    assert [one.first_s for one in play(asks, Costs(step_s=second_a_step), Rules())] == [1.0, 11.0]


def test_beside_answers_a_prompt_is_cut_so_that_they_are_not_held_up() -> None:
    def by_rows(step: Step) -> float:
        return 1.0 + 0.01 * step.prompt_tokens

    asks = [Ask(prompt_tokens=500, answer_tokens=5), Ask(prompt_tokens=300, answer_tokens=1)]
    first, second = play(asks, Costs(step_s=by_rows), Rules(stretch=0.4), callers=2)

    assert 1.2 < first.tpot_s <= 1.4
    assert second.first_s > first.done_s


def test_a_picture_is_encoded_first_and_pictures_one_after_another() -> None:
    asks = [Ask(prompt_tokens=8, answer_tokens=1, tiles=1)] * 2
    costs = Costs(step_s=lambda step: 1e-9, tiles_s=lambda tiles: 3.0 * tiles)

    assert [round(one.ttft_s, 3) for one in play(asks, costs, Rules(), callers=2)] == [3.0, 6.0]


def test_what_runs_beside_one_another_takes_as_long_as_one_after_the_other() -> None:
    asks = [Ask(prompt_tokens=8, answer_tokens=10), Ask(prompt_tokens=8, answer_tokens=1, tiles=1)]
    costs = Costs(step_s=second_a_step, tiles_s=lambda tiles: 5.0)

    told = play(asks, costs, Rules(encoder_share=0.5), callers=2)

    assert max(one.done_s for one in told) == pytest.approx(15.0, abs=1.0)
