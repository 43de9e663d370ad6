"""A convolution and its linear form give the same, in float64."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset13 as op
from torch.nn.functional import conv1d, conv2d

from triptych.compile.graph import decompressed, parameter, reshape, transpose
from triptych.compress.rounding import Grid, round_weight
from triptych.compress.unfold import columns, matrix
from triptych.core.quantized import Quantized, dequantize
from triptych.errors import CheckpointError

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


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


@pytest.mark.parametrize("stride", [1, 2])
def test_openvino_runs_four_bits_of_a_convolution_in_its_linear_form(stride: int):
    x, kernel = random(1, 32, 18).float(), random(16, 32, 3).float()
    held = round_weight(matrix(kernel), Grid(bits=4, group_size=32))
    whole = conv1d(x, torch.from_numpy(dequantize(held)).reshape(kernel.shape), stride=stride, padding=1)

    model = in_openvino(held, stride=stride)
    found = ov.Core().compile_model(model, "CPU", EXACT)([x.numpy()])[0]

    assert "u4" in {node.get_output_element_type(0).to_string() for node in model.get_ops()}
    torch.testing.assert_close(torch.from_numpy(found).mT, whole, rtol=0, atol=1e-4)


def in_openvino(held: Quantized, *, stride: int, size: int = 3) -> ov.Model:
    """im2col as the runtime has it: `size` strided slices of the padded sound, side by side; then one product."""
    sound = parameter("sound", [1, held.shape[1] // size, -1], ov.Type.f32)
    sides = op.constant(np.array([0, 0, 1]))
    padded = op.pad(sound, sides, sides, "constant", op.constant(np.float32(0)))
    slices = []
    for offset in range(size):
        ends = (offset, np.iinfo(np.int64).max if offset == size - 1 else offset - size + 1)
        start, stop, step, axis = (op.constant(np.array([value])) for value in (*ends, stride, 2))
        slices.append(op.unsqueeze(op.slice(padded, start, stop, step, axis), op.constant(3)))
    rows = reshape(transpose(op.concat(slices, 3), 0, 2, 1, 3), 0, -1, held.shape[1])
    product = op.matmul(rows, decompressed(held, held.shape), False, True)
    return ov.Model([op.result(product)], [sound], "conv1d")
