"""The decoder written once more in plain numpy, float64: judge of the graph, of paging and of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import PagedDecoder
from triptych.core.spec import DecoderSpec, RopeSpec

Array = NDArray[Any]
Weights = dict[str, Array]
BLOCK_TOKENS = 32


def spec_of(**changed: Any) -> DecoderSpec:
    """A small decoder with grouped heads; `changed` names what a test is about."""
    facts: dict[str, Any] = {
        "num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate": 96,
        "vocab_size": 50, "max_positions": 512, "norm_eps": 1e-5, "rope": RopeSpec(theta=1e4),
    }  # fmt: skip
    return DecoderSpec(**(facts | changed))


def random_weights(spec: DecoderSpec, seed: int = 0) -> Weights:
    """Every tensor `build` may ask for, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, width: int) -> Array:
        return (rng.standard_normal((rows, width)) / np.sqrt(width)).astype(np.float32)

    def vector(size: int, centre: float) -> Array:
        return (centre + 0.1 * rng.standard_normal(size)).astype(np.float32)

    hidden, inner, dim = spec.hidden, spec.intermediate, spec.head_dim
    weights = {"embed_tokens.weight": matrix(spec.vocab_size, hidden), "norm.weight": vector(hidden, 1)}
    if not spec.tied:
        weights["lm_head.weight"] = matrix(spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        layer = {"input_layernorm.weight": vector(hidden, 1), "post_attention_layernorm.weight": vector(hidden, 1)}
        for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
            layer[f"self_attn.{name}_proj.weight"] = matrix(heads * dim, hidden)
            if spec.qkv_bias:
                layer[f"self_attn.{name}_proj.bias"] = vector(heads * dim, 0)
            if spec.qk_norm and name != "v":
                layer[f"self_attn.{name}_norm.weight"] = vector(dim, 1)
        layer["self_attn.o_proj.weight"] = matrix(hidden, spec.num_heads * dim)
        layer |= {f"mlp.{name}_proj.weight": matrix(inner, hidden) for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = matrix(hidden, inner)
        weights |= {f"layers.{i}.{name}": values for name, values in layer.items()}
    return weights


def logits(
    spec: DecoderSpec, weights: Weights, embeddings: Array, dtype: Any = np.float64, left: Array | None = None
) -> Array:
    """(T, hidden) of one sequence from position 0 → (T, vocab). left: (layers, T, T), what a layer still sees."""
    w: Callable[[str], Array] = lambda name: weights[name].astype(dtype)  # noqa: E731
    x, num_tokens = embeddings.astype(dtype), len(embeddings)
    angle = np.arange(num_tokens)[:, None] * frequencies(spec)
    cos, sin = np.cos(angle)[:, None].astype(dtype), np.sin(angle)[:, None].astype(dtype)
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    seen = (distance >= 0) & (distance < (spec.sliding_window or num_tokens))

    def norm(x: Array, scale: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * scale

    def heads(x: Array, layer: str, name: str, count: int) -> Array:
        y = x @ w(f"{layer}.{name}_proj.weight").T
        y = y + w(f"{layer}.{name}_proj.bias") if spec.qkv_bias else y
        y = y.reshape(num_tokens, count, spec.head_dim)
        if name == "v":
            return y
        y = norm(y, w(f"{layer}.{name}_norm.weight")) if spec.qk_norm else y
        first, second = np.split(y, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    for i in range(spec.num_layers):
        attn, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        y = norm(x, w(f"layers.{i}.input_layernorm.weight"))
        q = heads(y, attn, "q", spec.num_heads)
        k, v = (heads(y, attn, n, spec.num_kv_heads).repeat(spec.num_heads // spec.num_kv_heads, 1) for n in "kv")
        score = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(spec.head_dim)
        own = seen if left is None else seen & left[i]
        score = np.exp(np.where(own, score - score.max(-1, keepdims=True, where=own, initial=-np.inf), -np.inf))
        mixed = np.einsum("hqk,khd->qhd", score / score.sum(-1, keepdims=True), v).reshape(num_tokens, -1)
        x = x + mixed @ w(f"{attn}.o_proj.weight").T
        y = norm(x, w(f"layers.{i}.post_attention_layernorm.weight"))
        gate = y @ w(f"{mlp}.gate_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w(f"{mlp}.up_proj.weight").T)) @ w(f"{mlp}.down_proj.weight").T
    return norm(x, w("norm.weight")) @ w("embed_tokens.weight" if spec.tied else "lm_head.weight").T


def frequencies(spec: DecoderSpec) -> Array:
    """Radians a position, with a branch for each band as Meta's code for Llama 3.1 has."""
    rope, found = spec.rope, []
    for i in range(0, spec.head_dim, 2):
        frequency = 1 / rope.theta ** (i / spec.head_dim)
        turns = rope.original_positions * frequency / (2 * np.pi)
        if rope.scaling == "linear":
            frequency /= rope.factor
        if rope.scaling == "llama3" and turns < rope.low_freq_factor:
            frequency /= rope.factor
        elif rope.scaling == "llama3" and turns < rope.high_freq_factor:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        found.append(frequency)
    return np.array(found)


@dataclass
class Cached:
    """One sequence in the cache: its blocks, in the order of its tokens, and how many tokens they hold."""

    blocks: Sequence[int]
    num_tokens: int = field(default=0)


def step(decoder: PagedDecoder, work: Sequence[tuple[Cached, Array]]) -> list[Array]:
    """Feed each sequence its next embeddings, (n, hidden); returns each one's logits, (n, vocab)."""
    past = [sequence.num_tokens for sequence, _ in work]
    sizes = [len(embeddings) for _, embeddings in work]
    ends = [a + n for a, n in zip(past, sizes, strict=True)]
    used = [list(s.blocks)[: -(-end // BLOCK_TOKENS)] for (s, _), end in zip(work, ends, strict=True)]
    begins = np.cumsum([0, *sizes])
    out = decoder(
        {
            "embeddings": np.concatenate([embeddings for _, embeddings in work]),
            "position_ids": np.concatenate([np.arange(a, b) for a, b in zip(past, ends, strict=True)]),
            "past_lens": np.array(past, np.int32),
            "subsequence_begins": begins.astype(np.int32),
            "block_indices": np.concatenate(used).astype(np.int32),
            "block_indices_begins": np.cumsum([0, *map(len, used)]).astype(np.int32),
            "max_context_len": np.array(max(ends), np.int32),
            "sampled": np.arange(begins[-1]),
        }
    )["logits"].copy()
    for (sequence, _), end in zip(work, ends, strict=True):
        sequence.num_tokens = end
    return np.split(out, begins[1:-1])
