"""Streams that share scales: whom each weighting favours, and that the table is the plain sum."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from triptych.compress.fuse import FuseConfig, Streams, folded, fuse, loudest, sqnr_db
from triptych.core.spec import Modality
from triptych.errors import ConfigError

LOUD, QUIET = Modality.IMAGE, Modality.AUDIO


def streams(ratio: float = 30.0, width: int = 16) -> dict[Modality, torch.Tensor]:
    """Two encoders whose rows share channels; one is `ratio` times as loud, and has rare great values."""
    generator = torch.Generator().manual_seed(0)
    loud, quiet = (torch.randn(200, width, generator=generator) for _ in range(2))
    loud[::50] *= 6
    return {LOUD: ratio * loud, QUIET: quiet}


def rounded(value: float, scale: float, bits: int) -> float:
    top = 2 ** (bits - 1) - 1
    return scale * max(-top - 1, min(top, round(value / scale)))


def plain_sqnr_db(rows: torch.Tensor, scales: torch.Tensor, bits: int) -> float:
    """One value after another."""
    lost = whole = 0.0
    for row in rows.double().tolist():
        for value, scale in zip(row, scales.tolist(), strict=True):
            lost += (value - rounded(value, scale, bits)) ** 2
            whole += value**2
    return float(10 * torch.tensor(whole / lost, dtype=torch.double).log10())


@pytest.mark.parametrize("bits", [4, 8])
def test_sqnr_is_that_of_rounding_value_by_value(bits: int):
    rows = streams(width=3)[LOUD]
    scales = loudest({LOUD: rows}, bits).double() * 0.7

    assert sqnr_db(rows, scales, bits) == pytest.approx(plain_sqnr_db(rows, scales, bits), abs=1e-9)


def test_equal_weights_find_the_best_scale_of_each_channel_among_those_tried():
    config = FuseConfig(weighting="equal", bits=4, points=7)
    shared = streams(width=2, ratio=3.0)
    tops, (first, second) = loudest(shared, 4), shared.values()
    least = torch.stack([rows.abs().amax(0).double() for rows in shared.values()]).amin(0) / 7 * 0.25
    ladder = [tops * (least / tops) ** (step / 6) for step in range(7)]

    def cost(scales: torch.Tensor) -> float:
        return sum(10 ** (-plain_sqnr_db(rows, scales, 4) / 10) for rows in (first, second))

    tried = [torch.stack([ladder[i][0], ladder[j][1]]) for i, j in product(range(7), repeat=2)]
    torch.testing.assert_close(fuse(shared, config).scales, min(tried, key=cost))


def test_what_is_reported_is_what_the_scales_give():
    shared = streams()
    found = fuse(shared)

    for modality, rows in shared.items():
        assert found.sqnr_db[modality] == pytest.approx(sqnr_db(rows, found.scales), abs=1e-6)
    assert sum(found.weights.values()) == pytest.approx(1)


def test_scales_of_the_loudest_leave_the_quiet_stream_worst_and_ours_lift_it():
    shared = streams()
    unified = {modality: sqnr_db(rows, loudest(shared)) for modality, rows in shared.items()}

    ours = fuse(shared, FuseConfig(weighting="worst"))

    assert unified[LOUD] > unified[QUIET] + 15
    assert min(ours.sqnr_db.values()) > min(unified.values()) + 3


def test_weighting_by_snr_favours_the_loudest_and_weighting_the_worst_does_not():
    shared = streams(ratio=5.0)
    equal, naive, worst = (fuse(shared, FuseConfig(weighting=kind)).sqnr_db for kind in ("equal", "snr", "worst"))

    assert naive[LOUD] > equal[LOUD] > worst[LOUD]
    assert naive[QUIET] < equal[QUIET] < worst[QUIET]
    assert naive[LOUD] == pytest.approx(sqnr_db(shared[LOUD], loudest(shared)), abs=0.1)  # as if it were alone


def test_maxmin_lifts_the_worst_stream_at_least_as_far_as_any_other_weighting():
    shared = streams()
    worst_of = {kind: min(fuse(shared, FuseConfig(weighting=kind)).sqnr_db.values()) for kind in
                ("equal", "snr", "worst", "maxmin")}  # fmt: skip

    assert worst_of["maxmin"] == max(worst_of.values())


def test_scales_of_its_own_are_an_upper_bound_for_each_stream():
    shared = streams()
    together = fuse(shared)

    for modality, rows in shared.items():
        alone = fuse({modality: rows})
        assert alone.sqnr_db[modality] > together.sqnr_db[modality]


def test_a_channel_that_no_stream_uses_has_a_finite_scale():
    shared = {modality: rows.clone() for modality, rows in streams().items()}
    for rows in shared.values():
        rows[:, 3] = 0

    assert torch.isfinite(fuse(shared).scales).all()


def test_folded_scales_round_as_the_channels_own_did():
    rows = streams()[QUIET].double()
    scales = fuse(streams()).scales
    divisor, input_scale = folded(scales)

    torch.testing.assert_close((rows / divisor / input_scale).round(), (rows / scales).round(), rtol=0, atol=0)
    assert divisor.max() == 1


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ({}, "share no channels"),
        ({LOUD: torch.ones(2, 3), QUIET: torch.ones(2, 4)}, "share no channels"),
        ({LOUD: torch.ones(2, 3), QUIET: torch.zeros(2, 3)}, "audio stream is empty, silent"),
        ({LOUD: torch.full((2, 3), torch.nan)}, "image stream is empty, silent or not finite"),
    ],
)
def test_streams_that_cannot_share_are_refused(shared: Streams, message: str):
    with pytest.raises(ConfigError, match=message):
        fuse(shared)
