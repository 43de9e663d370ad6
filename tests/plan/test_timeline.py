"""The engine's schedule, played with made-up times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.device import CostPoint, StepCost
from triptych.core.filling import COARSE, size_of
from triptych.engine.pace import Pace
from triptych.plan.timeline import Ask, Costs, Rules, from_costs, most_beside, play
from triptych.plan.work import Chunk, Step


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


@given(
    answers=st.integers(1, 32),
    base_s=st.floats(1e-3, 1e-1),
    token_s=st.floats(1e-5, 1e-2),
)
def test_a_prompt_is_cut_where_the_engine_cuts_it(answers: int, base_s: float, token_s: float) -> None:
    """The engine has learnt each size of step there is, by its own clock."""

    def seconds(total: int) -> float:
        return base_s + token_s * total

    pace = Pace()
    for total in (answers, *range(1, 32), *range(32, 513, 16)):
        for _ in range(4):
            pace.saw_step(min(total, answers), max(0, total - answers), seconds(size_of(total)), is_alone=True)
    costs = Costs(step_s=lambda step: seconds(size_of(step.answers + step.prompt_tokens)))
    played = most_beside(costs, Rules(max_step_tokens=512), answers, 0)

    assert min(pace.prompt_tokens(answers) or 512, 512 - answers) == pytest.approx(played, abs=COARSE)


def test_a_token_beside_answers_costs_what_a_row_more_does() -> None:
    """Not what a prompt of one token would alone, which is prepared, let in and sampled as well."""
    flat = {"lowest_s": 0.0, "highest_s": 1.0}
    cost = StepCost(
        device="here", weights_digest="w", settings="", cached=(), cached_token_s=0.0, pair_s=0.0, tiles=(), error=0.0,
        decode=tuple(CostPoint(size=n, seconds=0.010 + 0.001 * n, **flat) for n in (1, 8, 32)),
        prefill=tuple(CostPoint(size=n, seconds=0.030 + 0.001 * n, **flat) for n in (8, 64, 512)),
    )  # fmt: skip
    mixed = Step(answers=4, chunks=(Chunk(num_tokens=12, is_last=False),))

    assert from_costs(cost).step_s(mixed) == pytest.approx(0.026, abs=1e-6)


def test_short_prompts_see_less_of_one_another_than_a_long_one_of_itself() -> None:
    flat = {"lowest_s": 0.0, "highest_s": 1.0}
    pair_s = 1e-7
    cost = StepCost(
        device="here", weights_digest="w", settings="", cached=(), cached_token_s=0.0, pair_s=pair_s, tiles=(),
        error=0.0, decode=(CostPoint(size=1, seconds=0.010, **flat),),
        prefill=tuple(CostPoint(size=n, seconds=1e-4 * n + pair_s * n * n / 2, **flat) for n in (8, 64, 256, 512)),
    )  # fmt: skip
    short = Step(chunks=(Chunk(num_tokens=64),) * 8)

    assert from_costs(cost).step_s(short) == pytest.approx(0.010 + 1e-4 * 512 + 8 * pair_s * 64**2 / 2)


def test_a_prompt_costs_what_the_rows_do_that_it_is_filled_up_to() -> None:
    flat = {"lowest_s": 0.0, "highest_s": 1.0}
    cost = StepCost(
        device="here", weights_digest="w", settings="", cached_token_s=0.0, error=0.0,
        decode=(CostPoint(size=1, seconds=0.010, **flat),),
        prefill=tuple(CostPoint(size=n, seconds=1e-4 * n, **flat) for n in (8, 64, 512)),
    )  # fmt: skip

    assert from_costs(cost).step_s(Step(chunks=(Chunk(num_tokens=100),))) == pytest.approx(0.010 + 1e-4 * 112)


def test_a_picture_is_encoded_first_and_pictures_one_after_another() -> None:
    asks = [Ask(prompt_tokens=8, answer_tokens=1, tiles=1)] * 2
    costs = Costs(step_s=lambda step: 1e-9, tiles_s=lambda tiles: 3.0 * tiles)

    assert [round(one.ttft_s, 3) for one in play(asks, costs, Rules(), callers=2)] == [3.0, 6.0]


def test_pictures_whose_time_was_too_short_to_be_measured_are_no_end_of_it() -> None:
    asks = [Ask(prompt_tokens=8, answer_tokens=2, tiles=1)] * 3

    assert len(play(asks, Costs(step_s=second_a_step, tiles_s=lambda tiles: 0.0), Rules(), callers=2)) == 3


def test_what_runs_beside_one_another_takes_as_long_as_one_after_the_other() -> None:
    asks = [Ask(prompt_tokens=8, answer_tokens=10), Ask(prompt_tokens=8, answer_tokens=1, tiles=1)]
    costs = Costs(step_s=second_a_step, tiles_s=lambda tiles: 5.0)

    told = play(asks, costs, Rules(encoder_share=0.5), callers=2)

    assert max(one.done_s for one in told) == pytest.approx(15.0, abs=1.0)
