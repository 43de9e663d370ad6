"""A convolution and its linear form give the same, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, conv2d

from triptych.compress.rounding import Grid, round_weight
from triptych.compress.unfold import columns, matrix
from triptych.core.quantized import dequantize
from triptych.errors import CheckpointError


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.double)


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (1, 0), (3, 2)])
def test_a_convolution_of_one_dimension_is_a_linear_layer_on_its_columns(stride: int, padding: int):
    x, kernel = random(2, 5, 17), random(7, 5, 3)

    found = columns(x, kernel, stride=stride, padding=padding) @ matrix(kernel).T

    torch.testing.assert_close(found.mT, conv1d(x, kernel, stride=stride, padding=padding), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("stride", "padding"), [(4, 0), (2, 1)])
def test_a_patch_embedding_is_a_linear_layer_on_its_patches(stride: int, padding: int):
    x, kernel = random(2, 3, 12, 8), random(6, 3, 4, 4)
    whole = conv2d(x, kernel, stride=stride, padding=padding)

    found = columns(x, kernel, stride=stride, padding=padding) @ matrix(kernel).T

    torch.testing.assert_close(found.mT, whole.flatten(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", [4, 6])
def test_few_bits_of_the_linear_form_are_few_bits_of_the_kernel(bits: int):
    x, kernel = random(1, 8, 20), random(4, 8, 4)
    held = round_weight(matrix(kernel).float(), Grid(bits=bits, group_size=16))
    back = torch.from_numpy(dequantize(held)).double()

    linear = columns(x, kernel, padding=1) @ back.T

    torch.testing.assert_close(linear.mT, conv1d(x, back.reshape(kernel.shape), padding=1), rtol=0, atol=1e-12)


def test_a_depthwise_kernel_has_no_linear_form():
    with pytest.raises(CheckpointError, match="no plain convolution"):
        columns(random(1, 8, 6, 6), random(8, 1, 3, 3))
