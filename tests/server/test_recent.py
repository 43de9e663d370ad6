"""Percentiles of the last minute."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triptych.server.recent import MOST, WINDOW_S, Percentiles, Recent
from triptych.testing import Clock


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50))
def test_percentiles_are_those_of_what_was_measured(values):
    recent = Recent(Clock())
    for value in values:
        recent.add(value)

    found = recent.percentiles()

    assert found.count == len(values)
    assert found.p50 == np.percentile(values, 50)
    assert found.p99 == np.percentile(values, 99)


def test_what_is_older_than_the_window_is_forgotten():
    clock = Clock()
    recent = Recent(clock)
    recent.add(9.0)
    clock.advance(WINDOW_S + 1)
    assert recent.percentiles() == Percentiles(count=0)
    recent.add(1.0)
    assert recent.percentiles() == Percentiles(count=1, p50=1.0, p95=1.0, p99=1.0)


def test_a_busy_server_keeps_a_bounded_number():
    recent = Recent(Clock())
    for _ in range(MOST + 10):
        recent.add(1.0)
    assert recent.percentiles().count == MOST
