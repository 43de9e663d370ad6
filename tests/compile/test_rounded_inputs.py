"""Static int8 of both towers: OpenVINO really multiplies in int8, and gives what its plain twin gives."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from triptych.compile import conv, vit
from triptych.compile.graph import Store, constant
from triptych.core.quantized import Held, Quantized
from triptych.core.spec import VisionSpec

COLOURS = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
CONV = VisionSpec(kind="conv", image_size=64, num_tokens=4, hidden=19, **COLOURS)
VIT = VisionSpec(
    kind="vit", image_size=32, num_tokens=16, hidden=64, patch=8, num_layers=2, num_heads=2, intermediate=128, **COLOURS
)
TOWERS = {"conv": (CONV, conv), "vit": (VIT, vit)}


class Plain(Store):
    """The twin: inputs rounded by divide, round and clip in f32, weights as f32 numbers."""

    def __init__(self) -> None:
        super().__init__("fp32")

    def met(self, x: Any, weight: Held) -> Any:
        if not isinstance(weight, Quantized):
            return x
        assert weight.input_scale is not None
        node = x if isinstance(x, ov.Node) else x.get_node()
        is_positive = node.get_type_name() == "Clamp"
        step = weight.input_scale * (127 / 255 if is_positive else 1)
        low, high = (0, 255) if is_positive else (-128, 127)
        whole = op.clamp(op.round(op.divide(x, constant(np.float32(step))), "half_to_even"), float(low), float(high))
        return op.multiply(whole, constant(np.float32(step)))


def tensor(name: str) -> np.ndarray:
    """Of a tower as narrow as it goes: 8 channels, 16 inside, 16 at the end."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    block, kind = name.split(".")[1:3] if name.startswith("blocks.") else ("0", name.split(".")[0])
    last = int(block) == len(conv.STRIDES) - 1
    inside = 16 if int(block) else 8
    shapes = {
        "stem": (8, 3, 3, 3),
        "expand": (16, 8, 1, 1),
        "depthwise": (inside, 1, 3, 3),
        "project": (16 if last else 8, inside, 1, 1),
    }
    shapes |= {"patch_embedding": (64, 3, 8, 8), "position_embedding": (16, 64), "fc1": (128, 64), "fc2": (64, 128)}
    owner = name.split(".")[-2]
    shape = shapes.get(kind) or shapes.get(owner, (64, 64))
    if name.endswith(".bias") or "norm" in owner:
        drawn = rng.standard_normal(shape[:1]).astype(np.float32) * 0.1
        return drawn + 1 if "norm" in owner and name.endswith("weight") else drawn
    return (rng.standard_normal(shape) * 1.5 / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def in_eight_bits(name: str) -> Held:
    values = tensor(name)
    if values.ndim < 2 or "position" in name:
        return values
    rows = values.reshape(len(values), -1)
    scales = np.abs(rows).max(1, keepdims=True) / 127
    codes = (np.rint(rows / scales) + 128).astype(np.uint8)
    held = Quantized(
        bits=8, codes=codes[:, None], scales=scales[..., None], zeros=np.full((len(rows), 1, 1), 128, np.uint8),
        shape=values.shape,
    )  # fmt: skip
    return replace(held, input_scale=6 / 127 if values.ndim == 4 else 4 / 127)


def compiled(tower: str, store: Store, weight: Any = in_eight_bits, **settings: Any) -> Any:
    spec, module = TOWERS[tower]
    model = module.build(spec, weight, store)
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **settings})


def pixels(tower: str) -> np.ndarray:
    side = TOWERS[tower][0].image_size
    return np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)


@pytest.mark.parametrize("tower", list(TOWERS))
def test_int8_gives_what_the_plain_twin_gives(tower: str) -> None:
    """Within 2 % of the signal's energy: a number near the middle of two steps may fall either way, nothing else."""
    exact = compiled(tower, Store("fp32"), tensor)(pixels(tower))[0]
    twin = compiled(tower, Plain())(pixels(tower))[0]
    found = compiled(tower, Store("stored"))(pixels(tower))[0]

    assert np.square(found - twin).sum() < 0.02**2 * np.square(twin).sum()
    assert np.square(twin - exact).sum() > 10 * np.square(found - twin).sum()  # rounding is seen, the difference is not


@pytest.mark.parametrize(
    ("tower", "kinds"), [("conv", {"Convolution", "GroupConvolution"}), ("vit", {"FullyConnected"})]
)
def test_the_products_run_in_int8(tower: str, kinds: set[str]) -> None:
    request = compiled(tower, Store("stored"), PERF_COUNT=True).create_infer_request()
    request.infer([pixels(tower)])

    ran = Counter(
        (info.node_type.removesuffix("QuantizedLegacy"), "i8" in info.exec_type.lower())
        for info in request.profiling_info
        if info.exec_type != "undef"
    )
    for kind in kinds:
        assert ran[kind, True] >= 10, ran
        assert ran[kind, False] <= 1, ran  # the first, which meets the pixels
