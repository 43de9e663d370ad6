"""Savings: which ways are measured, how a factor's share is told, what is refused."""

from __future__ import annotations

import math

import pytest

from triptych.core.traffic import Served, Traffic
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import MeasurementError
from triptych.plan.saving import Run, Saving, kept_of, plan_runs, run_of, saving_of

WORKLOAD = Workload(
    name="chat",
    kinds=(RequestKind(name="text", share=1, prompt=Sizes(least=8, most=8), answer=Sizes(least=4, most=4)),),
)
LEFT = {"weights": 0.5, "tokens": 0.9, "batching": 0.8}  # of the cost, once it is on


def run(on: tuple[str, ...], *, noise: float = 1.0, answer_tokens: int = 40) -> Run:
    cpu_s = 10.0 * noise * math.prod(LEFT[name] for name in on)
    return Run(
        on=on, cpu_s=cpu_s, wall_s=cpu_s / 2, peak_bytes=10**9, ttft_p95_s=cpu_s / 10, latency_p95_s=cpu_s / 5,
        num_requests=10, answer_tokens=answer_tokens,
    )  # fmt: skip


def runs() -> list[Run]:
    return [run(on) for on in plan_runs(tuple(LEFT))]


def test_the_ends_come_first_and_every_factor_is_switched_off_alone():
    ways = plan_runs(tuple(LEFT))
    assert ways[:2] == [(), ("weights", "tokens", "batching")]
    assert {("tokens", "batching"), ("weights", "batching"), ("weights", "tokens")} <= set(ways)
    assert len(ways) == len(set(ways))


def test_factors_that_do_not_meet_get_what_each_saves():
    plain, ours, saved, effects = saving_of(runs(), tuple(LEFT))
    assert plain.cost.value == 10.0
    assert saved.value == pytest.approx(1 - 0.5 * 0.9 * 0.8)
    for effect in effects:
        assert effect.step == pytest.approx(LEFT[effect.name])
        assert effect.cost_off == pytest.approx(1 / LEFT[effect.name] - 1)
        assert effect.memory_off == 0.0
    assert ours.cpu_s.num_samples == 1


def test_the_range_of_a_saving_is_its_worst_and_best_pair():
    disturbed = [*runs(), run((), noise=0.9), run(tuple(LEFT), noise=1.2)]
    _, _, saved, _ = saving_of(disturbed, tuple(LEFT))
    assert saved.lowest == pytest.approx(1 - 0.36 * 1.2 / 0.9)
    assert saved.highest == pytest.approx(1 - 0.36)


def test_steps_multiplied_are_the_whole_saving_though_factors_meet():
    meeting = [run(on, noise=0.7 if len(on) == 2 else 1.0) for on in plan_runs(tuple(LEFT))]
    _, _, saved, effects = saving_of(meeting, tuple(LEFT))
    assert math.prod(effect.step for effect in effects) == pytest.approx(1 - saved.value)
    assert effects[1].step == pytest.approx(0.9 * 0.7)
    assert effects[1].cost_off == pytest.approx(0.7 / 0.9 - 1)


def test_runs_of_different_traffic_are_not_compared():
    with pytest.raises(MeasurementError, match="different traffic"):
        saving_of([*runs(), run((), answer_tokens=41)], tuple(LEFT))


def test_a_way_that_was_not_measured_is_named():
    with pytest.raises(MeasurementError, match="the first: tokens \\+ batching"):
        saving_of([one for one in runs() if one.on != ("tokens", "batching")], tuple(LEFT))


def test_traffic_with_failures_is_no_saving():
    served = (
        Served(kind="text", asked_s=0.0, first_s=0.1, done_s=0.5, answer_tokens=4),
        Served(kind="text", asked_s=0.1, done_s=0.2, error="the queue is full"),
    )
    traffic = Traffic(workload=WORKLOAD, served=served, wall_s=1.0, cpu_s=1.5, peak_bytes=10**9, mean_bytes=10**9)
    with pytest.raises(MeasurementError, match="1 of 2 requests failed, the first: the queue is full"):
        run_of((), traffic)


def test_a_run_is_judged_from_when_a_request_was_due():
    served = tuple(
        Served(kind="text", asked_s=float(i), first_s=i + 0.1, done_s=i + 0.5, answer_tokens=4) for i in range(20)
    )
    traffic = Traffic(workload=WORKLOAD, served=served, wall_s=20.0, cpu_s=6.0, peak_bytes=2 * 10**9, mean_bytes=10**9)
    found = run_of(("weights",), traffic)
    assert (found.cost, found.answer_tokens) == (12.0, 80)
    assert (found.ttft_p95_s, found.latency_p95_s) == (pytest.approx(0.1), pytest.approx(0.5))


def test_what_is_kept_of_right_answers_has_an_interval():
    before, now = [True] * 90 + [False] * 10, [True] * 85 + [False] * 5 + [True] * 5 + [False] * 5
    kept = kept_of(before, now)
    assert kept.value == 1.0
    assert 0.9 < kept.lowest < 1.0 < kept.highest < 1.1
    with pytest.raises(MeasurementError, match="0 of 3"):
        kept_of([False] * 3, [True] * 3)


def test_a_saving_that_costs_quality_or_time_says_so():
    plain, ours, saved, effects = saving_of(runs(), tuple(LEFT))
    saving = Saving(
        name="tiny", workload=WORKLOAD, about=(), baseline=plain, ours=ours, saved=saved, effects=effects,
        num_questions=100, right=(90, 90), kept=kept_of([True] * 90 + [False] * 10, [True] * 90 + [False] * 10),
    )  # fmt: skip
    assert saving.complaints() == ()
    assert saving.complaints(least=0.9) == ("saves 64.0%, under 90%",)
    worse = Saving(
        name="tiny", workload=WORKLOAD, about=(), baseline=ours, ours=plain, saved=saved, effects=effects,
        num_questions=0,
    )  # fmt: skip
    assert worse.complaints() == (
        "no questions were asked: the quality is unknown",
        "p95 to the first token is 1 s, the baseline's 0.36 s",
        "p95 to the whole answer is 2 s, the baseline's 0.72 s",
    )
