"""EfficientNet-Lite0 as one OpenVINO model, its batch normalisation folded away.

pixels (N, size, size, 3) uint8 → features (N, cells, 320 + 3) f32; a cell's last three numbers are its mean colour,
normalised as the pixels are. The tower's head convolution is left to the projector: before it features are a quarter
of the size (arXiv:1905.11946; «Lite» has no squeeze-and-excitation and clamps to 0 … 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import openvino as ov
from openvino import opset13 as op

from triptych.compile.graph import Store, Value, Weight, activation, named, parameter, reshape, transpose
from triptych.compile.vit import normalized
from triptych.core.quantized import Quantized, reshaped
from triptych.core.spec import VisionSpec
from triptych.errors import CheckpointError

STEM_STRIDE = 2
STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)  # of each block's depthwise convolution
COLOURS = 3


def names() -> tuple[str, ...]:
    """Every tensor that `build` asks for. Block 0 expands nothing."""
    convs = ["stem"]
    for index in range(len(STRIDES)):
        convs += [f"blocks.{index}.{kind}" for kind in ("expand", "depthwise", "project") if index or kind != "expand"]
    return tuple(f"{conv}.{kind}" for conv in convs for kind in ("weight", "bias"))


def build(spec: VisionSpec, weight: Weight, store: Store) -> ov.Model:
    """The tower's graph; `weight` gives a tensor by a name of `names`. Raises CheckpointError on a wrong shape."""
    pixels = parameter("pixels", [-1, spec.image_size, spec.image_size, 3], ov.Type.u8)
    image = transpose(normalized(pixels, spec), 0, 3, 1, 2)
    tower = _Tower(weight=weight, store=store)
    x = activation(tower.conv(image, "stem", STEM_STRIDE), "relu6")
    for index, stride in enumerate(STRIDES):
        x = tower.block(x, index, stride)
    width, side = _width(x), isqrt(spec.num_tokens)
    if width + COLOURS != spec.hidden:
        raise CheckpointError(f"the tower gives {width} + {COLOURS} numbers a cell, the config says {spec.hidden}")
    cell = [spec.image_size // side] * 2
    colours = op.avg_pool(image, cell, [0, 0], [0, 0], cell, True, "floor", "explicit")
    features = op.concat([_cells(x, width), _cells(colours, COLOURS)], 2)
    return ov.Model([op.result(named(features, "features"))], [pixels], "vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """Builds one convolution after another."""

    weight: Weight
    store: Store

    def block(self, x: Value, index: int, stride: int) -> Value:
        """Widen, look around within each channel, narrow; added to x where the shape stays."""
        inside = activation(self.conv(x, f"blocks.{index}.expand"), "relu6") if index else x
        inside = activation(self.conv(inside, f"blocks.{index}.depthwise", stride), "relu6")
        inside = self.conv(inside, f"blocks.{index}.project")
        return op.add(x, inside) if stride == 1 and _width(inside) == _width(x) else inside

    def conv(self, x: Value, name: str, stride: int = 1) -> Value:
        """Padded as TensorFlow's SAME: the odd pixel goes right and below. One input channel means depthwise.

        Depthwise weights are few and low bits hurt them most: they stay f32 unless the checkpoint has them in low bits.
        """
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        rows, inner, *sides = weight.shape
        if len(sides) != 2 or bias.shape != (rows,) or inner not in (1, _width(x)):
            raise CheckpointError(f"vision {name}: weight {weight.shape} and bias {bias.shape} on {_width(x)} channels")
        total = max(sides[-1] - stride, 0)
        before, after = [total // 2] * 2, [total - total // 2] * 2
        place, x = ([stride] * 2, before, after, [1, 1]), self.store.met(x, weight)
        if inner == 1:
            apart = reshaped(weight, rows, 1, 1, *sides)
            is_plain = not isinstance(apart, Quantized)
            kernel = self.store.small(apart, f"{name}.weight") if is_plain else self.store.weight(name, apart)
            y = op.group_convolution(x, kernel, *place)
        else:
            y = op.convolution(x, self.store.weight(name, weight), *place)
        return op.add(y, self.store.small(reshaped(bias, 1, rows, 1, 1), f"{name}.bias"))


def _width(x: Value) -> int:
    """Channels of (N, C, H, W)."""
    return int(x.get_output_partial_shape(0)[1].get_length())


def _cells(x: Value, width: int) -> Value:
    """(N, width, g, g) → (N, g², width), row by row."""
    return reshape(transpose(x, 0, 2, 3, 1), 0, -1, width)
