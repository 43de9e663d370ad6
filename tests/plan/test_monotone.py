"""Monotone curves: the nearest one by least squares, smooth between points, silent beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from triptych.errors import ConfigError
from triptych.plan.monotone import isotonic, through


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12), st.booleans())
def test_the_nearest_monotone_values_are_those_of_pooling_violators(values: list[float], rises: bool):
    assert isotonic(values, rises=rises) == pytest.approx(isotonic_regression(values, increasing=rises).x, abs=1e-9)


def test_rows_are_fitted_each_by_itself():
    rows = np.random.default_rng(0).normal(size=(5, 3, 7))
    assert np.array_equal(isotonic(rows)[2, 1], isotonic(rows[2, 1]))


def test_a_curve_goes_through_its_points_and_is_monotone_between():
    curve = through([1, 2, 4, 9], [1.0, 1.0, 5.0, 6.0])
    assert curve([1, 2, 4, 9]) == pytest.approx([1, 1, 5, 6])
    assert (np.diff(curve(np.linspace(1, 9, 200))) >= 0).all()


@pytest.mark.parametrize("size", [0.5, 9.5])
def test_nothing_is_known_beyond_the_points(size: float):
    with pytest.raises(ConfigError, match=r"measured from 1 to 9, asked for (0|9)\.5"):
        through([1, 9], [1.0, 2.0])(size)
