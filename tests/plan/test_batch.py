"""The measured curve and its inversion: the batch for a rate or a latency, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from triptych.errors import ConfigError, MeasurementError
from triptych.plan import batch
from triptych.plan.batch import BatchCurve, Bound, inverse_batch_search
from triptych.plan.points import Point, Spread

SIZES = (1, 2, 4, 8, 12, 16)


def law(size: float) -> float:
    """Tokens/s: rises to 12 or so, then falls."""
    return 50 * size / (1 + 0.02 * (size - 1) + 0.006 * size * (size - 1))


def runs(
    rate: Callable[[float], float] = law, *, noise: float = 0.03, repeats: int = 3, seed: int = 0
) -> tuple[Point, ...]:
    rng = np.random.default_rng(seed)
    return tuple(run(size, rate(size) * float(np.exp(rng.normal(0, noise)))) for size in SIZES for _ in range(repeats))


def run(size: int, tokens_per_s: float) -> Point:
    """Answers of 20 tokens; a request's time by Little's law."""
    latency = 20 * size / tokens_per_s
    tpot = latency / 20
    return Point(
        concurrency=size, requests_per_s=tokens_per_s / 20, tokens_per_s=tokens_per_s, latency_s=latency,
        ttft=spread(2 * tpot), tpot=spread(tpot), latency=spread(latency), num_requests=4 * size,
    )  # fmt: skip


def spread(seconds: float) -> Spread:
    return Spread(p50=seconds, p95=1.2 * seconds, p99=1.4 * seconds)


def reach(value: float) -> Sequence[Bound]:
    return [Bound(metric="tokens_per_s", value=value)]


def test_the_curve_goes_through_what_was_measured_exactly():
    curve = BatchCurve(runs(noise=0.0))
    measured = np.isin(curve.batches, SIZES)
    assert curve.at("tokens_per_s")[measured] == pytest.approx([law(size) for size in SIZES])
    assert curve.at("tpot_p50")[measured] == pytest.approx([size / law(size) for size in SIZES])
    assert curve.peak == 12


@pytest.mark.parametrize("metric", list(batch.METRICS))
def test_latencies_only_rise_and_rates_rise_to_one_peak(metric: str):
    curve = BatchCurve(runs(noise=0.1, seed=3))
    for line in (curve.at(metric), *curve.curves(metric)):
        turn = int(curve.peak - curve.batches[0]) if metric in batch.RATES else len(line)
        assert (np.diff(line[: turn + 1]) >= -1e-9).all()
        assert (np.diff(line[turn:]) <= 1e-9).all()


@pytest.mark.parametrize("target", np.linspace(60, 260, 8).tolist())
def test_the_batch_found_is_the_smallest_that_surely_reaches_the_target(target: float):
    found = inverse_batch_search(BatchCurve(runs(noise=0.02)), reach(target))
    assert law(found.batch) >= target
    assert law(found.batch - 2) < target or found.batch <= 2
    assert found.least <= found.batch <= found.most
    assert found["tokens_per_s"].lowest <= law(found.batch) <= found["tokens_per_s"].highest


def test_runs_at_the_batch_found_reach_the_target_nine_times_of_ten():
    rng = np.random.default_rng(7)
    reached, held, total = 0, 0, 0
    for seed in range(25):
        curve = BatchCurve(runs(noise=0.05, seed=seed))
        for target in rng.uniform(55, 0.8 * law(12), 4):
            found = inverse_batch_search(curve, reach(target))
            measured = law(found.batch) * np.exp(rng.normal(0, 0.05))
            reached += measured >= target
            held += found["tokens_per_s"].lowest <= measured <= found["tokens_per_s"].highest
            total += 1
    assert reached >= 0.9 * total
    assert held >= 0.85 * total


def test_the_largest_batch_that_keeps_a_latency_is_found():
    found = inverse_batch_search(BatchCurve(runs(noise=0.01)), [Bound(metric="tpot_p95", value=0.036)])
    kept = [size for size in range(1, 13) if 1.2 * size / law(size) <= 0.036]
    assert found.batch in (max(kept), max(kept) - 1)


def test_a_rate_and_a_latency_together_are_the_smallest_batch_that_keeps_both():
    curve = BatchCurve(runs(noise=0.01))
    alone = inverse_batch_search(curve, reach(150))
    both = inverse_batch_search(curve, [*reach(150), Bound(metric="tpot_p95", value=0.05)])
    assert both.batch == alone.batch
    with pytest.raises(ConfigError, match=r"tpot_p95 of 0\.02: batch \d+ comes nearest"):
        inverse_batch_search(curve, [*reach(150), Bound(metric="tpot_p95", value=0.02)])


def two_bounds(slack: float) -> tuple[BatchCurve, list[Bound]]:
    """Time to first token scatters for itself; each bound alone is kept by 92 % of runs at batch 8, or by more."""
    rng = np.random.default_rng(5)
    points = [
        msgspec.structs.replace(one, ttft=spread(one.ttft.p50 * float(np.exp(rng.normal(0, 0.05))))) for one in runs()
    ]
    curve = BatchCurve(tuple(points))
    rate, first = (
        float(np.quantile(curve.runs_drawn(metric)[:, 7], share))
        for metric, share in (("tokens_per_s", 0.08), ("ttft_p95", 0.92))
    )
    return curve, [*reach(rate), Bound(metric="ttft_p95", value=slack * first)]


def test_what_nine_of_ten_runs_keep_singly_they_need_not_keep_together():
    curve, bounds = two_bounds(slack=1.0)
    assert all(inverse_batch_search(curve, [bound]).batch == 8 for bound in bounds)
    with pytest.raises(ConfigError, match=r"at once in nine of ten runs: batch \d+ comes nearest, in 8\d% of runs"):
        inverse_batch_search(curve, bounds)


def test_nine_of_ten_runs_at_the_batch_found_keep_all_bounds_together():
    curve, bounds = two_bounds(slack=1.15)
    at = inverse_batch_search(curve, bounds).batch - 1
    rates, firsts = (curve.runs_drawn(bound.metric)[:, at] for bound in bounds)
    assert np.mean((rates >= bounds[0].value) & (firsts <= bounds[1].value)) >= 0.9


def test_what_no_batch_reaches_is_refused_with_the_best_there_is():
    with pytest.raises(ConfigError, match=r"tokens_per_s of 900: batch 12 comes nearest with 29\d"):
        inverse_batch_search(BatchCurve(runs(noise=0.01)), reach(900))


def test_nothing_is_extrapolated():
    """Still rising at 16: twice as many might reach it, which nobody has measured."""
    curve = BatchCurve(runs(lambda size: 50 * size**0.8, noise=0.01))
    with pytest.raises(ConfigError, match="measured from 1 to 16 callers, the peak is at 16"):
        inverse_batch_search(curve, reach(600))
    assert inverse_batch_search(curve, reach(300)).batch <= 16


def test_a_batch_beyond_the_peak_is_never_chosen():
    found = inverse_batch_search(BatchCurve(runs(noise=0.01)), [Bound(metric="tpot_p95", value=10.0)])
    assert found.batch == 12


def test_the_scalability_law_agrees_where_the_curve_is_one():
    usl = BatchCurve(runs(noise=0.0)).usl
    assert (usl.rate, usl.contention, usl.coherency) == pytest.approx((50, 0.02, 0.006), rel=0.01)
    assert usl.error < 0.001


def test_repeats_that_do_not_repeat_are_refused():
    points = (*runs(), *(run(8, 2 * law(8)) for _ in range(3)))
    with pytest.raises(MeasurementError, match="8 callers: from .* in 6 runs"):
        BatchCurve(points)


def test_one_run_of_several_may_be_disturbed():
    curve = BatchCurve((*runs(), *(run(8, law(8)) for _ in range(2)), run(8, 0.4 * law(8))))
    assert curve.at("tokens_per_s")[7] == pytest.approx(law(8), rel=0.05)


def test_a_saturated_caller_is_refused():
    """The generator could not ask at 16: 16 callers said, 9 at once."""
    slow = msgspec.structs.replace(run(16, law(16)), requests_per_s=9 / 16 * law(16) / 20)
    with pytest.raises(MeasurementError, match="16 callers were measured.* 9 at once"):
        BatchCurve((*runs()[:-1], slow))


def test_too_few_runs_make_no_curve():
    with pytest.raises(MeasurementError, match="2 times, 3 are needed"):
        BatchCurve(runs()[:-1])
    with pytest.raises(MeasurementError, match="a curve needs 3"):
        BatchCurve(runs()[:6])


def test_what_is_no_figure_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="speed of 3 cannot be asked for"):
        inverse_batch_search(BatchCurve(runs()), [Bound(metric="speed", value=3)])
