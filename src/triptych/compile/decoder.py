"""The parametric decoder: Llama, Mistral, Qwen2 and Qwen3 as one plain causal OpenVINO model.

On disk it is a plain model over one sequence, which any OpenVINO runs:

    embeddings (T, hidden) f32, position_ids (T,) i64, sampled (R,) i64 → logits (R, vocab) f32

Each layer's rotated queries and keys, its values and its attention output carry the names of
`backends/paged.py`, which swaps every attention for the paged one when the decoder is opened for serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as op

from triptych.backends.paged import HEADS, AttentionFacts, node_name
from triptych.compile.graph import (
    Store,
    Value,
    Weight,
    activation,
    attention,
    constant,
    join_heads,
    named,
    parameter,
    reshape,
    rms_norm,
    rope_tables,
    rotate,
    split_heads,
)
from triptych.core.quantized import Held
from triptych.core.spec import DecoderSpec
from triptych.errors import CheckpointError


def build(spec: DecoderSpec, weight: Weight, store: Store) -> ov.Model:
    """The decoder's graph. `weight` gives a tensor by its name in the text model, e.g. `layers.0.mlp.up_proj.weight`.

    Raises CheckpointError when a tensor's shape is not the spec's.
    """
    _check(spec)
    embeddings = parameter("embeddings", [-1, spec.hidden], ov.Type.f32)
    position_ids = parameter("position_ids", [-1], ov.Type.i64)
    sampled = parameter("sampled", [-1], ov.Type.i64)
    layers = _Layers(
        spec=spec,
        weight=weight,
        store=store,
        tables=rope_tables(position_ids, spec.rope, spec.head_dim),
        mask=_window_mask(embeddings, spec.sliding_window),
    )
    x = embeddings
    for index in range(spec.num_layers):
        x = layers.layer(x, index, sampled if index == spec.num_layers - 1 else None)
    logits = layers.head(x)
    model = ov.Model([op.result(named(logits, "logits"))], [embeddings, position_ids, sampled], "decoder")
    facts(spec).write(model)
    return model


def facts(spec: DecoderSpec) -> AttentionFacts:
    """What the paged form must know of the attention layers."""
    return AttentionFacts(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        sliding_window=spec.sliding_window or 0,
    )


def residual_name(layer: int) -> str:
    """The friendly name of what a layer hands on, (T, hidden): verification cuts a decoder there."""
    return f"layers.{layer}.residual"


def _check(spec: DecoderSpec) -> None:
    if spec.head_dim % 2:
        raise CheckpointError(f"head_dim {spec.head_dim} is odd; rotary embedding turns pairs")
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(f"{spec.num_heads} heads cannot share {spec.num_kv_heads} key/value heads evenly")


def _window_mask(embeddings: Value, window: int | None) -> Value | None:
    """Which earlier tokens a token may look at when only the last `window` count, (T, T) boolean."""
    if window is None:
        return None
    zero, one = constant(np.int64(0)), constant(np.int64(1))
    num_tokens = op.gather(op.shape_of(embeddings), zero, zero)
    index = op.range(zero, num_tokens, one, "i64")
    distance = op.subtract(op.unsqueeze(index, one), op.unsqueeze(index, zero))
    return op.logical_and(op.greater_equal(distance, zero), op.less(distance, constant(np.int64(window))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """Builds one layer after another."""

    spec: DecoderSpec
    weight: Weight
    store: Store
    tables: tuple[Value, Value]
    mask: Value | None

    def layer(self, x: Value, index: int, sampled: Value | None) -> Value:
        """Attention and MLP, each added to x. The last layer goes on with the `sampled` rows alone."""
        spec, prefix = self.spec, f"layers.{index}"
        mixed = self._attend(self.norm(x, f"{prefix}.input_layernorm"), index)
        if sampled is not None:
            x, mixed = (op.gather(value, sampled, constant(np.int64(0))) for value in (x, mixed))
        width = spec.num_heads * spec.head_dim
        x = op.add(x, self.linear(mixed, f"{prefix}.self_attn.o_proj", spec.hidden, width))
        y = self.norm(x, f"{prefix}.post_attention_layernorm")
        gate = self.linear(y, f"{prefix}.mlp.gate_proj", spec.intermediate, spec.hidden)
        up = self.linear(y, f"{prefix}.mlp.up_proj", spec.intermediate, spec.hidden)
        gated = op.multiply(activation(gate, "silu"), up)
        x = op.add(x, self.linear(gated, f"{prefix}.mlp.down_proj", spec.hidden, spec.intermediate))
        return named(x, residual_name(index))

    def head(self, x: Value) -> Value:
        """Logits of the rows of x. In int4 alone, its errors would be most of the model's: int8 at least."""
        name = "embed_tokens.weight" if self.spec.tied else "lm_head.weight"
        table = self._tensor(name, (self.spec.vocab_size, self.spec.hidden))
        rows = self.store.weight(name.removesuffix(".weight"), table, least_bits=8)
        return op.matmul(self.store.met(self.norm(x, "norm"), table), rows, False, True)

    def norm(self, x: Value, name: str) -> Value:
        scale = self.store.small(self._tensor(f"{name}.weight", (self.spec.hidden,)), f"{name}.weight")
        return rms_norm(x, scale, self.spec.norm_eps)

    def linear(self, x: Value, name: str, rows: int, width: int, bias: bool = False) -> Value:
        weight = self._tensor(f"{name}.weight", (rows, width))
        return self.store.linear(x, name, weight, self._tensor(f"{name}.bias", (rows,)) if bias else None)

    def _attend(self, x: Value, index: int) -> Value:
        """Rotate, look back, and hand on (T, heads * head_dim), before the output projection."""
        spec, prefix = self.spec, f"layers.{index}.self_attn"
        query = self._turned(x, f"{prefix}.q", spec.num_heads)
        key = self._turned(x, f"{prefix}.k", spec.num_kv_heads)
        value = self.linear(x, f"{prefix}.v_proj", spec.num_kv_heads * spec.head_dim, spec.hidden, spec.qkv_bias)
        for role, node in zip(HEADS, (query, key, value), strict=True):
            named(node, node_name(index, role))
        width = spec.num_heads * spec.head_dim
        heads = (
            split_heads(self._one(query), spec.num_heads, spec.head_dim),
            self._shared(split_heads(self._one(key), spec.num_kv_heads, spec.head_dim)),
            self._shared(split_heads(self._one(value), spec.num_kv_heads, spec.head_dim)),
        )
        mixed = join_heads(attention(heads, causal=self.mask is None, mask=self.mask), width)
        return named(reshape(mixed, -1, width), node_name(index, "mixed"))

    def _turned(self, x: Value, name: str, num_heads: int) -> Value:
        """Queries or keys: projected, normed a head where the model does, turned by position; (T, width)."""
        spec = self.spec
        width = num_heads * spec.head_dim
        y = reshape(self.linear(x, f"{name}_proj", width, spec.hidden, spec.qkv_bias), 0, num_heads, 1, spec.head_dim)
        if spec.qk_norm:
            scale = self.store.small(self._tensor(f"{name}_norm.weight", (spec.head_dim,)), f"{name}_norm.weight")
            y = rms_norm(y, scale, spec.norm_eps)
        return reshape(rotate(y, self.tables), 0, width)

    def _one(self, x: Value) -> Value:
        return op.unsqueeze(x, constant(np.int64(0)))

    def _shared(self, heads: Value) -> Value:
        """Repeat key/value heads for the queries that share them (arXiv:2305.13245)."""
        spec = self.spec
        times = spec.num_heads // spec.num_kv_heads
        if times == 1:
            return heads
        apart = op.unsqueeze(heads, constant(np.int64(2)))
        repeated = op.tile(apart, constant(np.array([1, 1, times, 1, 1], np.int64)))
        return reshape(repeated, 0, spec.num_heads, -1, spec.head_dim)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Held:
        values = self.weight(name)
        if values.shape != shape:
            raise CheckpointError(f"{name} has shape {values.shape}, the config says {shape}")
        return values
