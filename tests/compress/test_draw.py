"""A draw of samples keeps those with media in."""

from __future__ import annotations

import pytest
from tests.compress.test_calibrate import mixed
from tests.compress.tiny import sample

from triptych.compress.draw import draw


def test_one_picture_among_many_long_texts_is_drawn():
    told, shown = [sample(seed, num_tokens=100) for seed in range(40)], mixed(0)

    for num_tokens in (1, 50, 1000):
        assert any(one is shown for one in draw([*told, shown], num_tokens))


@pytest.mark.parametrize(("num_shown", "num_told"), [(30, 70), (70, 30), (3, 97), (0, 50), (50, 0)])
def test_media_keep_their_share_of_any_number_of_samples(num_shown, num_told):
    samples = [mixed(0) for _ in range(num_shown)] + [sample() for _ in range(num_told)]

    for count in range(1, len(samples) + 1):
        drawn = draw(samples, 12 * count)
        assert len(drawn) == count
        assert sum(one.has_media for one in drawn) >= count * num_shown / len(samples)


def test_a_draw_is_as_long_as_asked_in_the_samples_own_order_and_the_same_each_time():
    samples = [(mixed if seed % 3 else sample)(seed) for seed in range(20)]

    drawn = draw(samples, 100)

    assert sum(one.num_tokens for one in drawn[1:]) < 100 <= sum(one.num_tokens for one in drawn)
    places = [next(place for place, one in enumerate(samples) if one is own) for own in drawn]
    assert places == sorted(places) != list(range(len(places)))
    assert all(one is other for one, other in zip(drawn, draw(samples, 100), strict=True))
    assert len(draw(samples, 10**6)) == len(samples)
