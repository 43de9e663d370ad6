"""What attention proposes, and how honestly it is held against the loss."""

from __future__ import annotations

import pytest

from triptych.compress.prediction import KeepPoint, predictions, rank_correlation, verdict, wanted_keep


def point(sample: str, keep: float, divergence: float, shortfall: float = 0.0, lost: float = 0.0) -> KeepPoint:
    return KeepPoint(sample=sample, keep=keep, divergence=divergence, same_top=1.0, shortfall=shortfall, lost=lost)


def test_the_effective_share_counts_what_all_rows_look_at():
    assert wanted_keep([0.1, 0.1, 0.1, 0.1]) == pytest.approx(1.0)
    assert wanted_keep([0.2, 0.0, 0.2, 0.0]) == pytest.approx(0.5)
    assert wanted_keep([0.0, 0.3]) == pytest.approx(0.5)
    assert wanted_keep([0.0, 0.0]) is None
    assert wanted_keep([]) is None


def test_ranks_are_those_of_spearman_with_equals_sharing():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 2, 4], [4, 3, 3, 1]) == pytest.approx(-1.0)
    # by hand: ranks 1, 2.5, 2.5, 4 against 2, 1, 3, 4
    assert rank_correlation([1, 2, 2, 4], [5, 3, 8, 9]) == pytest.approx(3 / (4.5 * 5) ** 0.5)


def test_what_cannot_be_ranked_is_none():
    assert rank_correlation([1, 2, 3], [1, 2, 3]) is None
    assert rank_correlation([1, 1, 1, 1], [1, 2, 3, 4]) is None


def test_a_proposal_that_only_repeats_the_ratio_is_called_bad():
    points = [
        point(str(i), keep, 1 - keep + 0.01 * i, shortfall=1 - keep) for keep in (0.25, 0.5, 0.75) for i in range(5)
    ]
    found = predictions(points)
    assert {one.name: one.within for one in found}["effective number"] is None
    assert verdict(found).startswith("The proposal predicts badly")


def test_a_proposal_that_knows_the_samples_apart_is_believed():
    points = [
        point(str(i), keep, (1 - keep) * (1 + i), shortfall=(1 - keep) * (1 + i) / 10)
        for keep in (0.25, 0.5)
        for i in range(5)
    ]
    by_name = {one.name: one for one in predictions(points)}
    assert by_name["effective number"].overall == pytest.approx(1.0)
    assert by_name["effective number"].within == pytest.approx(1.0)
    assert by_name["ratio alone"].overall < 0.9
    assert by_name["ratio alone"].within is None
    assert "predicts badly" not in verdict(tuple(by_name.values()))


def test_few_samples_get_no_verdict():
    assert verdict(predictions([point("one", 0.5, 0.1)])).startswith("Too few samples")
