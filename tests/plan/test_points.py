"""Points: what is read from a run, and which runs are unfit to plan with."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from triptych.core.device import DeviceSpec, Figure, Tier
from triptych.core.traffic import Served, Traffic
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import MeasurementError
from triptych.plan import points

KIND = RequestKind(name="text", share=1, prompt=Sizes(least=8, most=8), answer=Sizes(least=11, most=11))


def closed(callers: int, rounds: int, *, first_s: float = 0.2, last_s: float = 1.2, pause_s: float = 0.0) -> Traffic:
    """Callers that are answered alike, 11 tokens each; every later caller began a little later."""
    served = [
        Served(kind="text", asked_s=began, first_s=began + first_s, done_s=began + last_s, answer_tokens=11)
        for turn in range(rounds)
        for began in (0.01 * np.arange(callers) + turn * (last_s + pause_s)).tolist()
    ]
    workload = Workload(name="alike", kinds=(KIND,), arrivals="closed", concurrency=callers)
    return Traffic(workload=workload, served=tuple(served), wall_s=rounds * 2.0, cpu_s=1, peak_bytes=1, mean_bytes=1)


def opened(latency: list[float], *, gap_s: float = 0.1) -> Traffic:
    served = [
        Served(kind="text", asked_s=gap_s * turn, first_s=gap_s * turn + one / 2, done_s=gap_s * turn + one)
        for turn, one in enumerate(latency)
    ]
    workload = Workload(name="open", kinds=(KIND,), rate_per_s=1 / gap_s)
    return Traffic(workload=workload, served=tuple(served), wall_s=100, cpu_s=1, peak_bytes=1, mean_bytes=1)


def test_the_steady_part_has_the_rate_of_a_run_that_never_ends():
    found = points.point(closed(callers=4, rounds=6))
    assert found.requests_per_s == pytest.approx(4 / 1.2, rel=0.02)
    assert found.tokens_per_s == pytest.approx(44 / 1.2, rel=0.04)
    assert found.latency_s == pytest.approx(1.2)
    assert found.ttft.p50 == pytest.approx(0.2)
    assert found.tpot.p99 == pytest.approx(0.1)
    points.check_little(found)


def test_callers_that_pause_break_littles_law():
    found = points.point(closed(callers=4, rounds=6, pause_s=0.6))
    with pytest.raises(MeasurementError, match=r"4 callers were measured.*at once"):
        points.check_little(found)


def test_a_published_row_that_ran_other_concurrency_than_it_says_is_refused():
    """AIConfigurator's issue 1396: 384 users said, 192.44 tokens/s a GPU of 8, 44.59 tokens/s a user: 35 at once."""
    spread = points.spread([1.0])
    rate, tokens = 8 * 192.44, 500
    row = points.Point(
        concurrency=384, requests_per_s=rate / tokens, tokens_per_s=rate, latency_s=tokens / 44.59,
        ttft=spread, tpot=spread, latency=spread, num_requests=100,
    )  # fmt: skip
    with pytest.raises(MeasurementError, match=r"384 callers.*34\.5 at once"):
        points.check_little(row)


def test_a_run_with_a_failed_request_tells_nothing():
    run = closed(callers=2, rounds=6)
    failed = msgspec.structs.replace(run.served[3], error="the engine has stopped")
    run = msgspec.structs.replace(run, served=(*run.served[:3], failed, *run.served[4:]))
    with pytest.raises(MeasurementError, match=r"1 of 12 requests failed, the first: the engine has stopped"):
        points.point(run)


def test_a_run_without_a_steady_part_is_refused():
    with pytest.raises(MeasurementError, match=r"asked while all callers"):
        points.point(closed(callers=8, rounds=1))


def test_an_open_run_has_no_concurrency():
    with pytest.raises(MeasurementError, match="not closed"):
        points.point(opened([1.0] * 20))


def test_an_overloaded_run_is_told_from_a_busy_one():
    rng = np.random.default_rng(0)
    busy = list(rng.exponential(0.5, 60))
    overloaded = [0.5 + 0.08 * turn + noise for turn, noise in enumerate(rng.exponential(0.2, 60))]
    assert points.saturation(opened(busy).served) is None
    assert "latency grew" in (points.saturation(opened(overloaded).served) or "")


def test_a_run_that_refused_requests_is_saturated():
    run = opened([0.2] * 40)
    refused = [msgspec.structs.replace(one, error="come back later") for one in run.served[-3:]]
    assert "3 of 40 requests were refused" in (points.saturation([*run.served[:-3], *refused]) or "")


def machine(bytes_per_s: float) -> DeviceSpec:
    def figure(value: float) -> Figure:
        return Figure(value=value, lowest=0.9 * value, highest=1.1 * value, num_samples=5)

    tiers = (
        Tier(name="L3", num_bytes=32 << 20, bytes_per_s=figure(8 * bytes_per_s)),
        Tier(name="DRAM", num_bytes=16 << 30, bytes_per_s=figure(bytes_per_s)),
    )
    return DeviceSpec(
        name="here", kind="cpu", source="measured", num_cores=2, memory_bytes=16 << 30, tiers=tiers, rates=(),
        launch_s=figure(1e-5),
    )  # fmt: skip


@pytest.mark.parametrize(("told", "is_wrong"), [(12e9, False), (10e9, False), (6e9, True), (60e9, True)])
def test_a_wrong_bandwidth_is_found_by_a_step_that_reads_all_weights(told: float, is_wrong: bool):
    found = points.point(closed(callers=1, rounds=8))  # 0.1 s a token
    if not is_wrong:
        return points.check_bandwidth(found, 1_000_000_000, machine(told))
    with pytest.raises(MeasurementError, match="10 GB/s: here is said to read"):
        points.check_bandwidth(found, 1_000_000_000, machine(told))
    return None


def test_weights_that_a_cache_holds_say_nothing_of_the_memory():
    points.check_bandwidth(points.point(closed(callers=1, rounds=8)), 20 << 20, machine(1e12))
