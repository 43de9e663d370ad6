"""The parametric ViT, SigLIP's and CLIP's, as one OpenVINO model: pixels in, rows of features out.

pixels (N, size, size, 3) uint8 → features (N, tokens, hidden) f32
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as op

from triptych.compile.graph import (
    Array,
    Store,
    Value,
    Weight,
    activation,
    attention,
    constant,
    join_heads,
    layer_norm,
    named,
    parameter,
    reshape,
    split_heads,
    transpose,
)
from triptych.core.quantized import Held, plain, reshaped
from triptych.core.spec import VisionSpec
from triptych.errors import CheckpointError

_LAYER = (
    *(
        f"{layer}.{kind}"
        for layer in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ),
    *(f"self_attn.{proj}_proj.{kind}" for proj in ("q", "k", "v", "out") for kind in ("weight", "bias")),
)


def names(spec: VisionSpec) -> tuple[str, ...]:
    """Every tensor that `build` asks for, as Hugging Face names it inside the tower."""
    found = ["embeddings.patch_embedding.weight", "embeddings.position_embedding.weight"]
    found += ["embeddings.patch_embedding.bias"] if spec.patch_bias else []
    found += ["embeddings.class_embedding"] if spec.class_token else []
    found += ["pre_layrnorm.weight", "pre_layrnorm.bias"] if spec.pre_norm else []  # so spelt there
    found += ["post_layernorm.weight", "post_layernorm.bias"] if spec.post_norm else []
    return (*found, *(name for index in range(spec.num_layers) for name in layer_names(index)))


def layer_names(index: int) -> tuple[str, ...]:
    return tuple(f"encoder.layers.{index}.{name}" for name in _LAYER)


def build(spec: VisionSpec, weight: Weight, store: Store) -> ov.Model:
    """The tower's graph; `weight` gives a tensor by a name of `names`. Raises CheckpointError on a wrong shape."""
    pixels = parameter("pixels", [-1, spec.image_size, spec.image_size, 3], ov.Type.u8)
    tower = _Tower(spec=spec, weight=weight, store=store)
    x = tower.embed(normalized(pixels, spec))
    if spec.pre_norm:
        x = tower.norm(x, "pre_layrnorm")
    for index in range(spec.num_layers):
        x = tower.layer(x, f"encoder.layers.{index}")
    if spec.post_norm:
        x = tower.norm(x, "post_layernorm")
    if spec.first_row:
        x = _rows_from(x, spec.first_row)
    return ov.Model([op.result(named(x, "features"))], [pixels], "vision")


def normalized(pixels: Value, spec: VisionSpec) -> Value:
    """(x / 255 - mean) / std, a colour channel at a time, as f32."""
    scale = 1.0 / (255.0 * np.array(spec.std))
    shift = -np.array(spec.mean) / np.array(spec.std)
    scaled = op.multiply(op.convert(pixels, "f32"), constant(scale.astype(np.float32)))
    return op.add(scaled, constant(shift.astype(np.float32)))


def _rows_from(x: Value, first: int) -> Value:
    bounds = [constant(np.array([value], np.int64)) for value in (first, np.iinfo(np.int64).max, 1, 1)]
    return op.slice(x, *bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """Builds one layer after another."""

    spec: VisionSpec
    weight: Weight
    store: Store

    def embed(self, image: Value) -> Value:
        """Patches by one matrix product (a convolution whose stride is its size), class token, positions."""
        spec = self.spec
        side, patch, hidden = spec.image_size // spec.patch, spec.patch, spec.hidden
        kernel = self._tensor("embeddings.patch_embedding.weight", (hidden, 3, patch, patch))
        bias = self._tensor("embeddings.patch_embedding.bias", (hidden,)) if spec.patch_bias else None
        rows = patches(image, side, patch, spec.image_size)
        x = self.store.linear(rows, "embeddings.patch_embedding", reshaped(kernel, hidden, 3 * patch * patch), bias)
        num_positions = side * side + spec.class_token
        table = plain(self._tensor("embeddings.position_embedding.weight", (num_positions, hidden))).astype(np.float32)
        if spec.class_token:
            first = plain(self._tensor("embeddings.class_embedding", (hidden,))).astype(np.float32) + table[0]
            x = op.add(x, self.store.small(table[1:][None]))
            return op.concat([self._everywhere(x, first), x], 1)
        return op.add(x, self.store.small(table[None]))

    def layer(self, x: Value, prefix: str) -> Value:
        """Attention and MLP, each on a normed copy and added to x."""
        spec = self.spec
        y = self.norm(x, f"{prefix}.layer_norm1")
        heads = [self.linear(y, f"{prefix}.self_attn.{proj}_proj", spec.hidden, spec.hidden) for proj in "qkv"]
        query, key, value = (split_heads(h, spec.num_heads, spec.hidden // spec.num_heads) for h in heads)
        mixed = join_heads(attention((query, key, value)), spec.hidden)
        x = op.add(x, self.linear(mixed, f"{prefix}.self_attn.out_proj", spec.hidden, spec.hidden))
        y = self.norm(x, f"{prefix}.layer_norm2")
        y = activation(self.linear(y, f"{prefix}.mlp.fc1", spec.intermediate, spec.hidden), spec.activation)
        return op.add(x, self.linear(y, f"{prefix}.mlp.fc2", spec.hidden, spec.intermediate))

    def norm(self, x: Value, name: str) -> Value:
        names = (f"{name}.weight", f"{name}.bias")
        scale, bias = (self.store.small(self._tensor(each, (self.spec.hidden,)), each) for each in names)
        return layer_norm(x, scale, bias, self.spec.norm_eps)

    def linear(self, x: Value, name: str, rows: int, width: int) -> Value:
        weight = self._tensor(f"{name}.weight", (rows, width))
        return self.store.linear(x, name, weight, self._tensor(f"{name}.bias", (rows,)))

    def _everywhere(self, x: Value, row: Array) -> Value:
        """One constant row (1, hidden) for each of the N samples of x."""
        num_samples = op.gather(op.shape_of(x), constant(np.array([0], np.int64)), constant(np.int64(0)))
        shape = op.concat([num_samples, constant(np.array([1, self.spec.hidden], np.int64))], 0)
        return op.broadcast(self.store.small(row[None, None]), shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Held:
        values = self.weight(name)
        if values.shape != shape:
            raise CheckpointError(f"vision {name} has shape {values.shape}, the config says {shape}")
        return values


def patches(image: Value, side: int, patch: int, size: int) -> Value:
    """(N, size, size, 3) → (N, side², 3 · patch²), row by row, each a colour after the other, as kernels lie.

    Pixels beyond the last whole patch are left out.
    """
    if side * patch < size:
        first, step = constant(np.array([0, 0], np.int64)), constant(np.array([1, 1], np.int64))
        whole = constant(np.array([side * patch, side * patch], np.int64))
        image = op.slice(image, first, whole, step, constant(np.array([1, 2], np.int64)))
    apart = transpose(reshape(image, -1, side, patch, side, patch, 3), 0, 1, 3, 5, 2, 4)
    return reshape(apart, -1, side * side, patch * patch * 3)
