"""Measured curves are read between their points, as scipy reads them, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from triptych.core.curve import seconds_at, step_s
from triptych.core.device import CostPoint, StepCost
from triptych.errors import ConfigError


def points(*pairs: tuple[float, float]) -> tuple[CostPoint, ...]:
    return tuple(CostPoint(size=size, seconds=s, lowest_s=s, highest_s=s) for size, s in pairs)


COST = StepCost(
    device="here",
    weights_digest="",
    settings="",
    decode=points((1, 0.01), (2, 0.011), (8, 0.016)),
    cached_token_s=1e-6,
    prefill=points((8, 0.004), (512, 0.2)),
    pair_s=1e-8,
    error=0.0,
)


@given(
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=8, unique=True).map(sorted),
    steps=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    share=st.floats(0, 1),
)
def test_between_points_a_curve_is_what_scipy_makes_of_them(sizes: list[int], steps: list[float], share: float) -> None:
    values = np.cumsum(steps)[: len(sizes)]
    at = sizes[0] + share * (sizes[-1] - sizes[0])

    found = seconds_at(points(*zip(sizes, values.tolist(), strict=True)), at)

    assert found == pytest.approx(float(PchipInterpolator(sizes, values)(at)), rel=1e-9, abs=1e-12)


def test_nothing_is_said_beyond_the_last_point() -> None:
    with pytest.raises(ConfigError, match="up to a size of 8, not 9"):
        step_s(COST, 9)
    with pytest.raises(ConfigError, match="no points"):
        seconds_at((), 1)


def test_a_step_is_its_answers_their_cache_its_prompt_and_what_came_before_it() -> None:
    assert step_s(COST, 2) == pytest.approx(0.011)
    assert step_s(COST, 2, cached=1000) == pytest.approx(0.012)
    assert step_s(COST, 2, prompt=512) == pytest.approx(0.211)
    assert step_s(COST, 2, prompt=512, earlier=1000) == pytest.approx(0.211 + 512 * 1000 * 1e-8)
    assert step_s(COST, 0, prompt=8) == pytest.approx(0.014)  # the weights are read all the same
