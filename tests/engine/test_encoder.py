"""Tiles of several pictures side by side: no copy of the tower rests, and each picture is still by itself."""

import numpy as np
import pytest

from triptych.core.spec import Modality
from triptych.core.stages import StageClock
from triptych.engine.encoder import Encoded, Encoder, Tower
from triptych.testing import BrightnessEncoder, PassProjector, picture, text_table


class Counting(BrightnessEncoder):
    """How many tiles each call had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def __call__(self, arrays):
        self.calls.append(len(arrays["pixels"]))
        return super().__call__(arrays)


@pytest.fixture
def part() -> Counting:
    return Counting()


def encode(part: Counting, *pictures, side_by_side: int = 2) -> dict[str, Encoded]:
    tower = Tower(open_parts=lambda: (part, PassProjector()), max_tiles=8, side_by_side=side_by_side)
    encoder = Encoder({Modality.IMAGE: tower}, text_table, StageClock())
    encoder.begin(pictures)
    return {done.digest: done for done in encoder.finished()}


@pytest.mark.parametrize(
    ("counts", "calls"),
    [
        ((3, 3), [4, 2]),  # the odd tile's neighbour is the next picture's first
        ((1, 1, 1), [2, 1]),
        ((2, 3), [2, 3]),  # nothing rests
        ((1, 5, 1), [2, 4, 1]),
        ((3,), [3]),
    ],
)
def test_an_odd_tile_takes_one_of_the_next_picture_along(part, counts, calls):
    pictures = [picture(10 * number, num_tiles=count) for number, count in enumerate(counts, 1)]
    together = encode(part, *pictures)
    assert part.calls == calls
    for one in pictures:
        np.testing.assert_array_equal(together[one.digest].rows, encode(Counting(), one)[one.digest].rows)


def test_with_more_copies_a_picture_lends_all_that_it_has(part):
    encode(part, picture(1), picture(2), picture(3, num_tiles=4), side_by_side=4)
    assert part.calls == [2, 4]


def test_where_tiles_do_not_run_side_by_side_pictures_do_not_either(part):
    encode(part, picture(1), picture(2), side_by_side=1)
    assert part.calls == [1, 1]


def test_a_picture_that_fails_does_not_fail_the_one_it_went_with(part):
    part.fail_when = lambda pixels: bool((pixels == 66).any())
    done = encode(part, picture(1), picture(66), picture(2))
    assert [done[one].error is None for one in ("1x1", "66x1", "2x1")] == [True, False, True]
    assert done["2x1"].rows[0, 0] == 2


def test_a_picture_of_no_numbers_does_not_spoil_the_one_it_went_with(part, monkeypatch):
    seen = BrightnessEncoder.__call__

    def spoiled(self, arrays):
        features = seen(self, arrays)["features"]
        features[arrays["pixels"].max((1, 2, 3)) == 66] = np.nan
        return {"features": features}

    monkeypatch.setattr(BrightnessEncoder, "__call__", spoiled)
    done = encode(part, picture(66), picture(1))
    assert part.calls == [2]
    assert "NaN" in str(done["66x1"].error)
    assert done["1x1"].rows[0, 0] == 1
