"""ΔV: fitted where slices ran, assumed between two published points elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.core.device import DeviceSpec, Figure, Link, Tier, Worth
from triptych.errors import MeasurementError
from triptych.plan.topology import (
    CROSS,
    FAR_WAY,
    NEAR,
    NEAR_WAY,
    Observation,
    Slice,
    Way,
    assumed,
    copy_seconds,
    fit,
    hit_share,
    rank_slices,
    value,
)

GEN4 = Way(generation=4, lanes=16)


def observed(alpha: float, beta: float, way: Way = GEN4, noise: float = 0.0) -> list[Observation]:
    random = np.random.default_rng(0)
    facts = random.random((24, 2))
    return [
        Observation(way=way, bandwidth=b, hits=h, speed=alpha * b + beta * h + noise * random.standard_normal())
        for b, h in facts
    ]


def link(source: str, target: str, rate: float, *, measured: bool = True, **facts) -> Link:
    bytes_per_s = Figure(value=rate, lowest=rate, highest=rate, num_samples=5 if measured else 1)
    return Link(
        source=source, target=target, kind="pcie", bytes_per_s=bytes_per_s, latency_s=Figure.exact(1e-5), **facts
    )


def device(cache: float = 100e9, memory: float = 30e9) -> DeviceSpec:
    tiers = (Tier(name="L3", num_bytes=32 << 20, bytes_per_s=Figure.exact(cache)),
             Tier(name="DRAM", num_bytes=8 << 30, bytes_per_s=Figure.exact(memory)))  # fmt: skip
    return DeviceSpec(name="planted", kind="cpu", source="measured", num_cores=2, memory_bytes=8 << 30, tiers=tiers,
                      rates=(), launch_s=Figure.exact(1e-6))  # fmt: skip


def test_the_published_points_are_what_is_assumed_there():
    for way, point in ((NEAR_WAY, NEAR), (FAR_WAY, CROSS)):
        assert (assumed(way).alpha, assumed(way).beta) == pytest.approx(point)


def test_between_the_points_a_wider_and_a_nearer_way_lives_more_by_its_bandwidth():
    across = assumed(Way(generation=5, lanes=16, distance=20)).alpha
    narrow = assumed(Way(generation=4, lanes=8)).alpha

    assert CROSS[0] < across < NEAR[0]
    assert CROSS[0] < narrow < NEAR[0]
    assert assumed(Way(generation=6, lanes=16)).alpha == pytest.approx(NEAR[0])
    assert assumed(Way(generation=1, lanes=1, distance=40)).alpha == pytest.approx(CROSS[0])


def test_a_fit_finds_the_weights_that_the_speeds_were_made_of():
    (worth,) = fit(observed(0.6, 0.35, noise=0.01)).values()

    assert worth.alpha == pytest.approx(0.6, abs=0.02)
    assert worth.beta == pytest.approx(0.35, abs=0.02)
    assert worth.error == pytest.approx(0.01, abs=0.005)
    assert worth.num_observations == 24


def test_each_kind_of_way_has_its_own_weights():
    found = fit(observed(0.7, 0.2) + observed(0.4, 0.6, FAR_WAY))

    assert found[GEN4].alpha == pytest.approx(0.7, abs=0.02)
    assert found[FAR_WAY].alpha == pytest.approx(0.4, abs=0.02)


def test_a_weight_is_never_negative():
    (worth,) = fit(observed(0.8, -0.15)).values()

    assert worth.beta == 0.0
    assert 0.6 < worth.alpha < 0.8


def test_speeds_that_bandwidth_and_hits_do_not_explain_are_refused():
    with pytest.raises(MeasurementError, match="miss 24 measured speeds"):
        fit(observed(0.5, 0.5, noise=0.6))


def test_nothing_hits_on_first_use_and_what_fits_hits_ever_after():
    assert hit_share(Slice(tile_bytes=1 << 20, group=1), 32 << 20) == 0
    assert hit_share(Slice(tile_bytes=1 << 20, group=4), 32 << 20) == 0.75
    assert hit_share(Slice(tile_bytes=32 << 20, group=4), 32 << 20) == 0.375
    assert hit_share(Slice(tile_bytes=64 << 20, group=4), 32 << 20) == 0


def test_of_slices_the_best_is_large_enough_to_be_shared_and_small_enough_to_stay():
    pieces = [
        Slice(tile_bytes=size << 20, group=group, row_bytes=1 << 20) for size in (1, 8, 64) for group in (1, 8, 64)
    ]

    best = rank_slices(pieces, device(), link("node:0", "node:0", 30e9, worth=Worth(alpha=0.9, beta=0.6)))[0][1]

    assert (best.tile_bytes >> 20, best.group) == (8, 8)


def test_a_slice_that_everybody_reads_at_once_runs_at_what_bandwidth_and_hits_are_worth():
    over = link("node:0", "node:0", 30e9, worth=Worth(alpha=0.9, beta=0.6))

    ((alone, _),) = rank_slices([Slice(tile_bytes=1 << 20, group=1)], device(), over)
    ((shared, _),) = rank_slices([Slice(tile_bytes=1 << 20, group=4)], device(), over)

    assert alone == pytest.approx(0.9 * 0.3)
    assert shared == pytest.approx(0.9 * 0.3 + 0.6 * 0.75)


def test_a_peak_is_discounted_by_what_bandwidth_is_worth_and_a_measured_rate_is_not():
    gen5 = {"generation": 5, "lanes": 16}
    peak, fitted = (link("cpu:0", "gpu:0", 63e9, measured=False, worth=worth, **gen5)
                    for worth in (None, Worth(alpha=0.5, beta=0.5)))  # fmt: skip

    assert copy_seconds(63 << 20, link("cpu:0", "gpu:0", 63e9)) == pytest.approx(1e-5 + (63 << 20) / 63e9)
    assert copy_seconds(63 << 20, peak) == pytest.approx(1e-5 + (63 << 20) / 63e9 / 0.72)
    assert copy_seconds(63 << 20, fitted) == pytest.approx(1e-5 + (63 << 20) / 63e9 / 0.5)
    assert value(Worth(alpha=0.72, beta=0.28), 0.5, 1.0) == pytest.approx(0.64)
