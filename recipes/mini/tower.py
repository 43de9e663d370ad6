"""EfficientNet-Lite0 with its batch normalisation folded in: the plain torch reference of the vision part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# (kernel, stride) of each block's depthwise convolution; block 0 has no expansion.
BLOCKS = [
    (3, 1),
    (3, 2),
    (3, 1),
    (5, 2),
    (5, 1),
    (3, 2),
    (3, 1),
    (3, 1),
    (5, 1),
    (5, 1),
    (5, 1),
    (5, 2),
    (5, 1),
    (5, 1),
    (5, 1),
    (3, 1),
]
BN_EPSILON = 1e-3
MEAN, SCALE = 127.0, 128.0
TRUNK_WIDTH = 320
HEAD_WIDTH = 1280
FEATURE_WIDTH = TRUNK_WIDTH + 3  # and the mean colour of each cell
Weights = dict[str, Tensor]


def fold(state: Weights, conv: str, norm: str) -> tuple[Tensor, Tensor]:
    """A convolution and the batch normalisation behind it as one weight and bias."""
    gain = state[f"{norm}.weight"] / torch.sqrt(state[f"{norm}.running_var"] + BN_EPSILON)
    bias = state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * gain
    return state[f"{conv}.weight"] * gain[:, None, None, None], bias


def folded(state: Weights) -> Weights:
    """The published state dict under our names: stem, blocks.N.{expand,depthwise,project}, head."""
    pairs = {"stem": ("_conv_stem", "_bn0"), "head": ("_conv_head", "_bn1")}
    for i in range(len(BLOCKS)):
        if i:
            pairs[f"blocks.{i}.expand"] = (f"_blocks.{i}._expand_conv", f"_blocks.{i}._bn0")
        pairs[f"blocks.{i}.depthwise"] = (f"_blocks.{i}._depthwise_conv", f"_blocks.{i}._bn1")
        pairs[f"blocks.{i}.project"] = (f"_blocks.{i}._project_conv", f"_blocks.{i}._bn2")
    weights: Weights = {}
    for ours, (conv, norm) in pairs.items():
        weights[f"{ours}.weight"], weights[f"{ours}.bias"] = fold(state, conv, norm)
    return weights


def same(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Pad as TensorFlow's SAME does: the odd pixel goes to the right and the bottom."""
    total = max(kernel - stride, 0)
    before = total // 2
    return F.pad(x, (before, total - before, before, total - before))


def conv(x: Tensor, weights: Weights, name: str, stride: int = 1) -> Tensor:
    """One folded convolution; a weight of one input channel is depthwise."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    groups = x.shape[1] if weight.shape[1] == 1 else 1
    return F.conv2d(same(x, weight.shape[-1], stride), weight, bias, stride=stride, groups=groups)


def trunk(pixels: Tensor, weights: Weights) -> Tensor:
    """uint8 pixels (N, S, S, 3) to (N, 320, S/32, S/32): everything before the head convolution."""
    x = (pixels.permute(0, 3, 1, 2).to(weights["stem.weight"].dtype) - MEAN) / SCALE
    x = F.relu6(conv(x.contiguous(memory_format=torch.channels_last), weights, "stem", 2))
    for i, (_, stride) in enumerate(BLOCKS):
        inside = F.relu6(conv(x, weights, f"blocks.{i}.expand")) if i else x
        inside = F.relu6(conv(inside, weights, f"blocks.{i}.depthwise", stride))
        inside = conv(inside, weights, f"blocks.{i}.project")
        x = x + inside if inside.shape == x.shape else inside
    return x


def head(x: Tensor, weights: Weights) -> Tensor:
    """Trunk output (N, cells, 320) to (N, cells, 1280), between 0 and 6."""
    weight = weights["head.weight"][:, :, 0, 0]
    return F.relu6(F.linear(x, weight.to(x.dtype), weights["head.bias"].to(x.dtype)))


def cell_colours(pixels: Tensor, grid: int) -> Tensor:
    """The mean colour of each grid cell, (N, cells, 3), normalised as the pixels are."""
    side = pixels.shape[1] // grid
    shape = (len(pixels), grid, side, grid, side, 3)
    mean = pixels.reshape(shape).float().mean((2, 4))
    return ((mean - MEAN) / SCALE).reshape(len(pixels), grid * grid, 3)


def features(pixels: Tensor, weights: Weights) -> Tensor:
    """The whole vision part: uint8 pixels (N, S, S, 3) to (N, cells, 323)."""
    x = trunk(pixels, weights)
    cells = x.flatten(2).transpose(1, 2)
    return torch.cat([cells, cell_colours(pixels, x.shape[-1]).to(cells.dtype)], -1)
