"""Rounding to few bits: what it may lose, what it refuses, and that it is its plain form."""

import numpy as np
import pytest
import torch

from triptych.compress.rounding import Grid, fake_quantized, fitted, round_weight
from triptych.core.quantized import dequantize
from triptych.errors import CheckpointError, ConfigError

GRIDS = [Grid(bits=bits, group_size=32, symmetric=symmetric) for bits in (2, 3, 4, 5, 8) for symmetric in (True, False)]


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_t(4, shape).astype(np.float32))


def squared_error(weight: torch.Tensor, held, importance=None) -> float:
    lost = (torch.from_numpy(dequantize(held)) - weight).square()
    return float((lost if importance is None else lost * importance).sum())


def plain(weight: np.ndarray, grid: Grid) -> np.ndarray:
    """Whole range, one group after another."""
    back = np.empty_like(weight)
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], grid.size(weight.shape[1])):
            part = slice(start, start + grid.size(weight.shape[1]))
            group = weight[row, part]
            if grid.symmetric:
                scale, zero = (
                    np.float32(np.float16(np.abs(group).max() / ((2**grid.bits - 1) / 2))),
                    2 ** (grid.bits - 1),
                )
            else:
                low, high = min(group.min(), 0), max(group.max(), 0)
                scale = np.float32(np.float16((high - low) / (2**grid.bits - 1)))
                zero = round(float(-low / scale))
            codes = np.clip(np.round(group / scale) + zero, 0, 2**grid.bits - 1)
            back[row, part] = (codes - zero) * scale
    return back


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_without_clipping_it_is_the_plain_loop(grid):
    weight = rows(0, 6, 96)

    back = dequantize(round_weight(weight, grid, clip=False))

    np.testing.assert_allclose(back, plain(weight.numpy(), grid), atol=1e-6)


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid.bits < 5], ids=str)
def test_the_clipping_search_lowers_the_error(grid):
    weight = rows(0, 32, 96)

    assert squared_error(weight, round_weight(weight, grid)) < 0.97 * squared_error(
        weight, round_weight(weight, grid, clip=False)
    )


def test_importance_moves_the_error_to_where_it_counts_least():
    weight, importance = rows(0, 32, 96), torch.logspace(-2, 2, 96)[torch.randperm(96)]
    grid = Grid(bits=3, group_size=32)

    weighted = squared_error(weight, round_weight(weight, grid, importance=importance), importance)

    assert weighted < 0.95 * squared_error(weight, round_weight(weight, grid), importance)


def test_equal_importance_changes_nothing():
    weight, grid = rows(0, 8, 64), Grid(bits=4, group_size=32)

    one, two = round_weight(weight, grid, importance=torch.ones(64)), round_weight(weight, grid)

    np.testing.assert_array_equal(one.codes, two.codes)
    np.testing.assert_array_equal(one.scales, two.scales)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_codes_are_chosen_for_the_scale_that_is_stored(kind):
    weight, grid = rows(0, 8, 64), Grid(bits=8, group_size=None, scale_type=kind)

    held = round_weight(weight, grid)

    scale = held.scales.astype(np.float32)
    assert held.scales.dtype.name == kind
    np.testing.assert_array_equal(
        held.codes, np.clip(np.round(weight.numpy()[:, None] / scale) + 128, 0, 255).astype(np.uint8)
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_storage_is_counted_to_the_bit(symmetric):
    grid = Grid(bits=4, group_size=32, symmetric=symmetric)

    held = round_weight(rows(0, 8, 64), grid)

    assert held.num_bits == grid.num_bits(8, 64) == 8 * 64 * 4 + 16 * (16 if symmetric else 20)


def test_rows_of_zeros_and_chunks_of_rows_change_nothing(monkeypatch):
    weight, grid = rows(0, 40, 64), Grid(bits=4, group_size=32)
    weight[7] = 0
    whole = round_weight(weight, grid)
    monkeypatch.setattr("triptych.compress.rounding.CHUNK_VALUES", 64 * 3)

    parts = round_weight(weight, grid)

    np.testing.assert_array_equal(whole.codes, parts.codes)
    assert (dequantize(whole)[7] == 0).all()


@pytest.mark.parametrize(("width", "asked", "found"), [(576, 64, 64), (100, 64, None), (96, 64, 32), (1504, 128, 32)])
def test_groups_that_do_not_divide_a_width_fall_back_and_say_so(width, asked, found):
    grid, sentence = fitted(Grid(bits=4, group_size=asked), "layers.0.mlp.up_proj", width)

    assert grid.group_size == found
    assert (sentence is None) == (asked == found)
    assert sentence is None or ("layers.0.mlp.up_proj" in sentence and str(asked) in sentence)


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(ConfigError, match="9 bits"):
        Grid(bits=9)
    with pytest.raises(CheckpointError, match="width 100 is not a multiple of 64"):
        round_weight(rows(0, 2, 100), Grid(bits=4, group_size=64))
    with pytest.raises(CheckpointError, match="not finite"):
        round_weight(torch.full((2, 64), torch.nan), Grid(bits=4, group_size=64))


def test_fake_quantized_is_what_the_codes_stand_for():
    weight, grid = rows(0, 8, 64), Grid(bits=4, group_size=32)

    np.testing.assert_array_equal(fake_quantized(weight, grid).numpy(), dequantize(round_weight(weight, grid)))
