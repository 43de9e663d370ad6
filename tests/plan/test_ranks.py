"""All-reduces between two real processes: every algorithm gives the sum, and its time."""

from __future__ import annotations

import pytest

from triptych.errors import ConfigError, MeasurementError
from triptych.plan import ranks
from triptych.plan.pareto import fit_ladder

pytest.importorskip("torch")


def test_two_ranks_sum_in_three_ways_and_their_ladder_can_be_fitted():
    samples = ranks.measure_ladder(2, sizes=(1024, 65_536, 262_144), repeats=3)
    assert {one.algorithm for one in samples} == {"ring", "one shot", "tree"}
    assert all(one.seconds.value > 0 and one.seconds.num_samples == 3 for one in samples)
    assert fit_ladder(samples).fastest(65_536).seconds(65_536) > 0


def test_one_rank_has_nothing_to_reduce():
    with pytest.raises(ConfigError, match="1 rank"):
        ranks.measure_ladder(1)


def test_a_rank_that_fails_is_told_and_ends_the_others():
    with pytest.raises(MeasurementError, match="a rank ended"):
        ranks.measure_ladder(2, sizes=(1 << 62,), repeats=1)
