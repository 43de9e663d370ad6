"""What forgetting needs to know of a model, measured on samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from numpy_decoder import frequencies, spec_of
from triptych.compress.kv import KVWatch, turned_back
from triptych.compress.samples import Sample
from triptych.core.rope import rope_frequencies, turn

SPEC = spec_of(num_layers=2, head_dim=8)
HEADS, DIM = SPEC.num_heads, SPEC.head_dim


def sample(modality: list[int]) -> Sample:
    size = len(modality)
    return Sample(
        name="s",
        token_ids=np.zeros(size, np.int32),
        embeddings=np.zeros((size, SPEC.hidden), np.float32),
        modality=np.array(modality, np.uint8),
        is_answer=np.zeros(size, np.bool_),
        tiles=np.zeros((0, 1, 1, 3), np.uint8),
        rows=np.zeros(0, np.int32),
    )


def drawn(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((SPEC.num_layers, HEADS, size, DIM)).astype(np.float32)


def watch_over(*samples: tuple[list[int], np.ndarray, np.ndarray]) -> KVWatch:
    """A watch that has seen these (modality, queries before RoPE, keys)."""
    watch = KVWatch(SPEC)
    for modality, queries, keys in samples:
        angles = np.arange(len(modality))[:, None] * rope_frequencies(SPEC.rope, DIM)
        rotated = turn(queries, np.cos(angles), np.sin(angles)).astype(np.float32)
        hooks = watch.begin(sample(modality))
        assert hooks.on_attention is not None
        for layer in range(SPEC.num_layers):
            given = torch.from_numpy(rotated[layer][None]), torch.from_numpy(keys[layer][None])
            hooks.on_attention(f"layers.{layer}.mixed", *given, given[1])
    return watch


def test_queries_are_turned_back_to_where_rope_found_them():
    query = drawn(1, 12)[0]
    turned = np.empty_like(query)
    for position in range(12):
        for pair, frequency in enumerate(frequencies(SPEC)):
            angle, half = position * frequency, DIM // 2
            first, second = query[:, position, pair], query[:, position, half + pair]
            turned[:, position, pair] = first * np.cos(angle) - second * np.sin(angle)
            turned[:, position, half + pair] = second * np.cos(angle) + first * np.sin(angle)
    np.testing.assert_allclose(turned_back(turned, rope_frequencies(SPEC.rope, DIM)), query, atol=1e-5)


def test_mean_and_covariance_are_those_of_text_after_media_without_the_sinks():
    first, second = [0, 0, 1, 1, 1, 0, 0, 0, 1, 0], [0] * 9
    one, two = drawn(1, 10), drawn(2, 9)
    queries = watch_over((first, one, drawn(3, 10)), (second, two, drawn(4, 9))).queries()

    seen = np.concatenate([one[:, :, [5, 6, 7, 9]], two[:, :, 4:]], axis=2).astype(np.float64)
    np.testing.assert_allclose(queries.mean, seen.mean(axis=2), atol=1e-5)
    for layer in range(SPEC.num_layers):
        for head in range(HEADS):
            expected = np.cov(seen[layer, head], rowvar=False, bias=True)
            np.testing.assert_allclose(queries.covariance[layer, head], expected, atol=1e-5)


def test_a_layer_that_looks_at_everything_is_dense_and_one_that_looks_at_itself_is_not():
    size = 12
    queries, keys = np.zeros((SPEC.num_layers, HEADS, size, DIM), np.float32), drawn(3, size)
    eye = np.eye(size)[:, :DIM] if size <= DIM else np.random.default_rng(0).standard_normal((size, DIM))
    angles = np.arange(size)[:, None] * rope_frequencies(SPEC.rope, DIM)
    keys[1] = 100 * eye / np.linalg.norm(eye, axis=-1, keepdims=True)
    queries[1] = turn(keys[1], np.cos(angles), -np.sin(angles))  # after RoPE they are the keys themselves
    dense, sparse = watch_over(([0] * size, queries, keys)).layer_density()

    assert dense == pytest.approx(1.0)
    assert sparse < 0.25
