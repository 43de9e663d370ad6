"""EfficientNet-Lite as an OpenVINO graph: a convolutional tower whose batch normalisation is folded away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op

Array = NDArray[Any]
Node = Any  # openvino.Output and openvino.Node are untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """What an EfficientNet-Lite is. blocks: (kernel, stride) of each depthwise convolution; block 0 expands nothing."""

    side_pixels: int
    grid: int  # cells a side
    mean: float
    scale: float
    blocks: tuple[tuple[int, int], ...]


def constant(value: Array) -> Node:
    """An fp32 constant; fp16 is kept as stored and converted in the graph, as OpenVINO does for compressed weights."""
    value = np.ascontiguousarray(value)  # OpenVINO 2026.4 misreads a strided fp16 array
    if value.dtype == np.float16:
        return op.convert(op.constant(value), np.float32)
    return op.constant(value.astype(np.float32))


def conv(x: Node, weights: Mapping[str, Array], name: str, stride: int = 1) -> Node:
    """A convolution padded as TensorFlow's SAME (the odd pixel right and below); one input channel means depthwise."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    kernel = weight.shape[-1]
    total = max(kernel - stride, 0)
    before, after = [total // 2] * 2, [total - total // 2] * 2
    if weight.shape[1] == 1:
        grouped = constant(weight[:, None])  # (groups, 1, 1, kernel, kernel)
        y = op.group_convolution(x, grouped, [stride] * 2, before, after, [1, 1])
    else:
        y = op.convolution(x, constant(weight), [stride] * 2, before, after, [1, 1])
    return op.add(y, constant(bias.reshape(1, -1, 1, 1)))


def relu6(x: Node) -> Node:
    """Clamp to 0 … 6."""
    return op.clamp(x, 0.0, 6.0)


def trunk(x: Node, weights: Mapping[str, Array], spec: ConvSpec) -> Node:
    """Normalised (N, 3, S, S) to (N, channels, grid, grid): everything before the head convolution."""
    x = relu6(conv(x, weights, "stem", 2))
    for i, (_, stride) in enumerate(spec.blocks):
        inside = relu6(conv(x, weights, f"blocks.{i}.expand")) if i else x
        inside = relu6(conv(inside, weights, f"blocks.{i}.depthwise", stride))
        inside = conv(inside, weights, f"blocks.{i}.project")
        same_width = weights[f"blocks.{i}.project.weight"].shape[0] == x.get_output_partial_shape(0)[1].get_length()
        x = op.add(x, inside) if stride == 1 and same_width else inside
    return x


def cells(x: Node) -> Node:
    """(N, C, g, g) to (N, g·g, C), row by row."""
    x = op.transpose(x, op.constant(np.array([0, 2, 3, 1])))
    shape = op.constant(np.array([0, -1, x.get_output_partial_shape(0)[3].get_length()]))
    return op.reshape(x, shape, special_zero=True)


def tower(weights: Mapping[str, Array], spec: ConvSpec, *, headless: bool = False) -> ov.Model:
    """The vision part: `pixels` uint8 (N, S, S, 3) to `features` f32 (N, g·g, head width + 3).

    The last three numbers of a cell are its mean colour, normalised as the pixels are. `headless` leaves the head
    convolution out: what a recipe caches, since it is a quarter of the size.
    """
    side = spec.side_pixels
    pixels = op.parameter([-1, side, side, 3], np.uint8, name="pixels")
    x = op.transpose(op.convert(pixels, np.float32), op.constant(np.array([0, 3, 1, 2])))
    x = op.divide(op.subtract(x, op.constant(np.float32(spec.mean))), op.constant(np.float32(spec.scale)))
    seen = trunk(x, weights, spec)
    if not headless:
        seen = relu6(conv(seen, weights, "head"))
    cell = side // spec.grid
    colours = op.avg_pool(x, [cell, cell], [0, 0], [0, 0], [cell, cell], True, "floor", "explicit")
    features = op.concat([cells(seen), cells(colours)], 2)
    features.output(0).get_tensor().set_names({"features"})
    pixels.output(0).get_tensor().set_names({"pixels"})
    return ov.Model([features], [pixels], "vision")
