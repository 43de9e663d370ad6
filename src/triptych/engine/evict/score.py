"""How much a cached token matters: five measures of one shape.

Layers share pages among all their key/value heads, so a layer keeps or loses a token for all heads at once: every
measure is averaged over heads (AdaKV's choice by head, arXiv:2407.11550, is not open to us).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.core.rope import rope_frequencies, turn
from triptych.core.spec import DecoderSpec

Array = NDArray[Any]
HORIZON = 512  # future positions over which expected attention is averaged
FLOOR = 0.001  # added to expected attention, so that a token nobody looks at still counts by its value
SINKS = 4  # first rows: they draw attention whatever they say, so they are left out of its softmax, and score highest
SMOOTH = 5  # tokens over which SnapKV averages


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer's cache for one sequence. keys (rotated) and values: (kv_heads, num_rows, head_dim).

    position: of the next token. queries: (w, heads, head_dim), of the last w tokens, whose own rows are the last w of
    `keys`; None where the decoder does not show them.
    """

    layer: int
    keys: Array
    values: Array
    position: int
    queries: Array | None = None


class Scorer(Protocol):
    def __call__(self, view: LayerView) -> Array:
        """Importance of each row, (num_rows,); the highest stay."""


class ExpectedAttention:
    """What queries still to come will see, if they are as those measured were (arXiv:2510.00636).

    A query before RoPE is taken as normal with the measured mean m and covariance S of its layer and head. Turned to
    a mean over the next positions, the logarithm of its expected attention to a key k is m·k/√d + k·S·k/2d.
    """

    def __init__(self, spec: DecoderSpec, mean: Array, covariance: Array) -> None:
        """mean: (layers, heads, head_dim) f32; covariance: (layers, heads, head_dim, head_dim) f32."""
        self._group = spec.num_heads // spec.num_kv_heads
        self._frequencies = rope_frequencies(spec.rope, spec.head_dim)
        self._mean = mean
        self._covariance = covariance

    def __call__(self, view: LayerView) -> Array:
        angles = (view.position + np.arange(HORIZON, dtype=np.float32))[:, None] * self._frequencies
        keys = turn(view.keys, np.cos(angles).mean(axis=0), -np.sin(angles).mean(axis=0))  # instead of every query
        attention = np.stack([self._expected(keys, view.layer, head) for head in range(self._mean.shape[1])])
        by_head = attention.reshape(len(keys), self._group, -1).mean(axis=1)
        scores: Array = ((by_head + FLOOR) * np.linalg.norm(view.values[:, SINKS:], axis=-1)).mean(axis=0)
        return np.concatenate([np.full(min(SINKS, keys.shape[1]), scores.max(initial=0.0)), scores])

    def _expected(self, keys: Array, layer: int, head: int) -> Array:
        own, dim = keys[head // self._group, SINKS:], keys.shape[-1]
        spread = np.einsum("nd,nd->n", own @ self._covariance[layer, head], own) / (2 * dim)
        return _softmax(own @ self._mean[layer, head] / dim**0.5 + spread)


def snapkv(view: LayerView) -> Array:
    """What the last tokens looked at, smoothed over neighbours (arXiv:2404.14469)."""
    seen = _attention(view).mean(axis=(0, 1))
    padded = np.pad(seen, SMOOTH // 2)
    smooth: Array = np.convolve(padded, np.full(SMOOTH, 1 / SMOOTH, seen.dtype), mode="valid")
    return smooth


def tova(view: LayerView) -> Array:
    """What the very last token looked at (arXiv:2401.06104)."""
    assert view.queries is not None
    seen: Array = _attention(replace(view, queries=view.queries[-1:])).mean(axis=(0, 1))
    return seen


def key_norm(view: LayerView) -> Array:
    """Short keys draw attention (arXiv:2406.11430)."""
    norms: Array = -np.linalg.norm(view.keys, axis=-1).mean(axis=0)
    return norms


def recency(view: LayerView) -> Array:
    """The latest stay: with sinks, StreamingLLM's window (arXiv:2309.17453), but at original positions."""
    return np.arange(view.keys.shape[1], dtype=np.float32)


def _attention(view: LayerView) -> Array:
    """Of the shown queries to all rows, causal: (heads, w, num_rows)."""
    assert view.queries is not None
    (num_queries, num_heads, dim), (num_kv_heads, num_rows, _) = view.queries.shape, view.keys.shape
    queries = view.queries.transpose(1, 0, 2).reshape(num_kv_heads, -1, dim) * np.float32(dim**-0.5)
    logits = (queries @ view.keys.transpose(0, 2, 1)).reshape(num_heads, num_queries, num_rows)
    own = np.arange(num_queries)
    logits[:, :, num_rows - num_queries :][:, own[:, None] < own] = -np.inf  # what came after the query
    return _softmax(logits)


def _softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    e /= e.sum(axis=-1, keepdims=True)
    return e
