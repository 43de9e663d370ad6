"""Rounding to low bits: how wrong it may be, and what it refuses."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.compile.quantize import CLIP_RATIOS, quantize
from triptych.core.quantized import dequantize

FLOATS = st.floats(-1e4, 1e4, width=32)
MATRICES = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.sampled_from([32, 64, 96])), elements=FLOATS)


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(MATRICES, st.sampled_from([(8, None), (4, 32)]))
def test_inside_the_clip_range_the_error_is_half_a_step(weight, kind):
    held = quantize(weight, bits=kind[0], group_size=kind[1])

    scale = held.scales.astype(np.float64)
    low, high = (0 - held.zeros.astype(float)) * scale, (2.0**held.bits - 1 - held.zeros.astype(float)) * scale
    groups = weight.reshape(held.codes.shape)
    error = np.abs(dequantize(held).reshape(held.codes.shape) - np.clip(groups, low, high))
    assert (error <= scale / 2 + 1e-6 * np.abs(groups).max(-1, keepdims=True)).all()


@settings(max_examples=60, deadline=None)
@given(MATRICES, st.sampled_from([(8, None), (4, 32)]))
def test_no_value_is_clipped_by_more_than_the_greatest_clip_ratio_allows(weight, kind):
    held = quantize(weight, bits=kind[0], group_size=kind[1])

    groups = weight.reshape(held.codes.shape)
    reach = np.maximum(groups.max(-1, keepdims=True), 0) - np.minimum(groups.min(-1, keepdims=True), 0)
    error = np.abs(dequantize(held).reshape(held.codes.shape) - groups)
    assert (error <= reach * (1 - min(CLIP_RATIOS)) + 1.01 * held.scales.astype(float)).all()


def test_the_clip_search_never_does_worse_than_the_whole_range():
    weight = np.random.default_rng(0).standard_t(4, (64, 256)).astype(np.float32)
    searched = dequantize(quantize(weight, bits=4, group_size=64))
    low = np.minimum(weight.reshape(-1, 64).min(-1, keepdims=True), 0)
    high = np.maximum(weight.reshape(-1, 64).max(-1, keepdims=True), 0)
    scale = (high - low) / 15
    zero = np.rint(-low / scale)
    plain = ((np.clip(np.rint(weight.reshape(-1, 64) / scale) + zero, 0, 15) - zero) * scale).reshape(weight.shape)

    assert ((searched - weight) ** 2).sum() < 0.97 * ((plain - weight) ** 2).sum()


@pytest.mark.parametrize(("bits", "least_db"), [(8, 40), (4, 20)])
def test_gaussian_rows_keep_their_signal(bits, least_db):
    weight = rows(0, 64, 512)

    error = dequantize(quantize(weight, bits=bits, group_size=64 if bits == 4 else None)) - weight

    assert 10 * np.log10((weight**2).mean() / (error**2).mean()) > least_db


@pytest.mark.parametrize(("bits", "size"), [(8, None), (4, 64)])
def test_rows_of_zeros_stay_zero(bits, size):
    weight = rows(0, 4, 128)
    weight[1] = 0

    held = quantize(weight, bits=bits, group_size=size)

    assert (dequantize(held)[1] == 0).all()
    assert np.isfinite(held.scales).all()


@pytest.mark.parametrize("value", [3.0, -3.0, 1e-7, -1e-30, 6e4, 1e30])
@pytest.mark.parametrize(("bits", "size"), [(8, None), (4, 64)])
def test_constant_rows_survive_at_any_magnitude(bits, size, value):
    weight = np.full((2, 64), value, np.float32)

    back = dequantize(quantize(weight, bits=bits, group_size=size))

    np.testing.assert_allclose(back, weight, rtol=2e-3)


@pytest.mark.parametrize(("magnitude", "dtype"), [(1.0, np.float16), (1e-6, np.float32), (1e9, np.float32)])
def test_scales_are_half_floats_only_where_those_hold_them(magnitude, dtype):
    held = quantize(rows(0, 4, 64) * np.float32(magnitude), bits=4, group_size=64)

    assert held.scales.dtype == dtype
    assert (held.scales > 0).all()
    assert np.isfinite(held.scales).all()


def test_scales_of_every_size_in_one_matrix_are_all_right():
    weight = rows(0, 6, 64) * np.array([1e-30, 1e-9, 1e-3, 1, 1e6, 1e30], np.float32)[:, None]

    error = np.abs(dequantize(quantize(weight, bits=8)) - weight).max(1)

    assert (error <= np.abs(weight).max(1) / 127).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_refused(value):
    weight = rows(0, 4, 64)
    weight[2, 5] = value

    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, bits=8)


def test_a_width_that_is_not_whole_groups_is_refused():
    with pytest.raises(ValueError, match="width 100 is not a multiple of 64"):
        quantize(rows(0, 4, 100), bits=4, group_size=64)


def test_chunks_of_rows_change_nothing():
    weight = rows(0, 3000, 64)  # several chunks

    whole, part = quantize(weight, bits=4, group_size=32), quantize(weight[2500:], bits=4, group_size=32)

    np.testing.assert_array_equal(whole.codes[2500:], part.codes)
    np.testing.assert_array_equal(whole.scales[2500:], part.scales)
