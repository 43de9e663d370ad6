"""What attention proposes, and how honestly it is held against the loss."""

from __future__ import annotations

import pytest

from triptych.compress.attention import LayerAttention
from triptych.compress.prediction import KeepPoint, predictions, rank_correlation, verdict, wanted_keep


def layer(effective: float | None, media: float) -> LayerAttention:
    mass = {"text": 1 - media, "image": media}
    return LayerAttention(text_media=0.5, media_text=None, probe=0.5, effective=effective, mass=mass, density=0.5)


def point(sample: str, keep: float, divergence: float, shortfall: float = 0.0, lost: float = 0.0) -> KeepPoint:
    return KeepPoint(sample=sample, keep=keep, divergence=divergence, same_top=1.0, shortfall=shortfall, lost=lost)


def test_layers_that_look_at_pictures_say_how_many_tokens_are_wanted():
    assert wanted_keep([layer(4.0, 0.3), layer(8.0, 0.1)], 10) == pytest.approx((0.3 * 4 + 0.1 * 8) / 0.4 / 10)
    assert wanted_keep([layer(12.0, 0.5)], 10) == 1.0
    assert wanted_keep([layer(None, 0.0), layer(4.0, 0.0)], 10) is None


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
