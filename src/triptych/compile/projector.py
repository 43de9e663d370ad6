"""From a tower's rows to a decoder's: Idefics3's pixel shuffle, LLaVA's MLP.

features (N, tokens, width) f32 → embeddings (N, tokens_out, hidden) f32, and extra (num_extra, hidden) f32
"""

from __future__ import annotations

from math import isqrt

import openvino as ov
from openvino import opset13 as op

from triptych.compile.graph import Store, Value, Weight, activation, named, parameter, reshape, transpose
from triptych.core.quantized import Held, reshaped
from triptych.core.spec import ProjectorSpec, VisionSpec
from triptych.errors import CheckpointError


def names(spec: ProjectorSpec) -> tuple[str, ...]:
    """Every tensor that `build` asks for, as Hugging Face names it inside the projector; `newline` is our name."""
    if spec.kind == "pixel_shuffle":
        return ("proj.weight",)
    kinds = ("weight", "bias") if spec.bias else ("weight",)
    linear = tuple(f"linear_{index}.{kind}" for index in (1, 2) for kind in kinds)
    return (*linear, "newline") if spec.num_extra else linear


def build(spec: ProjectorSpec, vision: VisionSpec, weight: Weight, store: Store) -> ov.Model:
    """The projector's graph; `weight` gives a tensor by a name of `names`. Raises CheckpointError on a wrong shape."""
    features = parameter("features", [-1, vision.num_tokens, vision.hidden], ov.Type.f32)

    def tensor(name: str, shape: tuple[int, ...]) -> Held:
        values = weight(name)
        if values.shape != shape:
            raise CheckpointError(f"projector {name} has shape {values.shape}, the config says {shape}")
        return values

    def linear(x: Value, name: str, width: int) -> Value:
        bias = tensor(f"{name}.bias", (spec.hidden,)) if spec.bias else None
        return store.linear(x, name, tensor(f"{name}.weight", (spec.hidden, width)), bias)

    if spec.kind == "pixel_shuffle":
        x = linear(pixel_shuffle(features, vision, spec.shuffle), "proj", vision.hidden * spec.shuffle**2)
    else:
        x = linear(features, "linear_1", vision.hidden)
        x = linear(activation(x, spec.activation), "linear_2", spec.hidden)
    results = [op.result(named(x, "embeddings"))]
    if spec.num_extra:
        newline = reshaped(tensor("newline", (spec.hidden,)), spec.num_extra, spec.hidden)
        results.append(op.result(named(store.small(newline), "extra")))
    return ov.Model(results, [features], "projector")


def pixel_shuffle(features: Value, vision: VisionSpec, shuffle: int) -> Value:
    """Each square of shuffle × shuffle rows becomes one row, `shuffle`² times as wide (arXiv:1609.05158, undone)."""
    side = isqrt(vision.num_tokens)
    squares = side // shuffle
    apart = reshape(features, -1, squares, shuffle, squares, shuffle, vision.hidden)
    return reshape(transpose(apart, 0, 1, 3, 2, 4, 5), -1, squares * squares, shuffle * shuffle * vision.hidden)
