"""Each measure against a plain loop over its paper's equation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from numpy_decoder import frequencies, spec_of
from triptych.core.policy import EVICTIONS
from triptych.core.queries import Queries
from triptych.engine.evict import score
from triptych.engine.evict.evictor import PLAIN
from triptych.errors import BundleError

SPEC = spec_of(head_dim=8)
HEADS, KV_HEADS, DIM, ROWS, WINDOW = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim, 23, 4


def view(**changed) -> score.LayerView:
    rng = np.random.default_rng(3)
    facts = {
        "layer": 1,
        "keys": rng.standard_normal((KV_HEADS, ROWS, DIM)).astype(np.float32),
        "values": rng.standard_normal((KV_HEADS, ROWS, DIM)).astype(np.float32),
        "position": 23,
        "queries": rng.standard_normal((WINDOW, HEADS, DIM)).astype(np.float32),
    }
    return score.LayerView(**(facts | changed))


def statistics() -> Queries:
    rng = np.random.default_rng(5)
    root = rng.standard_normal((SPEC.num_layers, HEADS, DIM, DIM)).astype(np.float32)
    return Queries(
        mean=rng.standard_normal((SPEC.num_layers, HEADS, DIM)).astype(np.float32),
        covariance=root @ root.transpose(0, 1, 3, 2) / DIM,
    )


def turned(position: int) -> np.ndarray:
    """RoPE's matrix at a position."""
    matrix, half = np.zeros((DIM, DIM)), DIM // 2
    for i, frequency in enumerate(frequencies(SPEC)):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        matrix[i, i] = matrix[half + i, half + i] = cos
        matrix[i, half + i], matrix[half + i, i] = -sin, sin
    return matrix


def softmax(values: list[float]) -> list[float]:
    exps = [math.exp(value - max(values)) for value in values]
    return [value / sum(exps) for value in exps]


def test_expected_attention_is_the_papers():
    seen, queries = view(), statistics()
    turn = sum(turned(seen.position + step) for step in range(score.HORIZON)) / score.HORIZON
    expected, group, rest = np.zeros(ROWS - score.SINKS), HEADS // KV_HEADS, slice(score.SINKS, None)
    for kv in range(KV_HEADS):
        attention = np.zeros(ROWS - score.SINKS)
        for head in range(kv * group, (kv + 1) * group):
            mean = turn @ queries.mean[1, head]
            spread = turn @ queries.covariance[1, head] @ turn.T
            logits = [
                mean @ key / DIM**0.5 + key @ spread @ key / (2 * DIM) for key in seen.keys[kv, rest].astype(float)
            ]
            attention += np.array(softmax(logits)) / group
        expected += (attention + score.FLOOR) * np.linalg.norm(seen.values[kv, rest], axis=-1) / KV_HEADS

    found = score.ExpectedAttention(SPEC, queries.mean, queries.covariance)(seen)

    np.testing.assert_allclose(found[score.SINKS :], expected, rtol=1e-4)  # greatest seen: 4e-6
    assert (found[: score.SINKS] == found.max()).all()
    few = view(keys=seen.keys[:, :3], values=seen.values[:, :3])
    assert score.ExpectedAttention(SPEC, queries.mean, queries.covariance)(few).shape == (3,)


def attention(seen: score.LayerView) -> np.ndarray:
    """(heads, w, rows), by loops."""
    found = np.zeros((HEADS, len(seen.queries), ROWS))
    for head in range(HEADS):
        for i, query in enumerate(seen.queries[:, head]):
            last = ROWS - len(seen.queries) + i
            own = seen.keys[head // (HEADS // KV_HEADS), : last + 1]
            found[head, i, : last + 1] = softmax([float(query @ key) / DIM**0.5 for key in own])
    return found


def test_snapkv_is_the_mean_over_the_window_smoothed_over_five_tokens():
    mean = attention(view()).mean(axis=(0, 1))
    expected = [sum(mean[max(0, i - 2) : i + 3]) / 5 for i in range(ROWS)]
    np.testing.assert_allclose(score.snapkv(view()), expected, rtol=1e-5, atol=1e-7)


def test_tova_is_what_the_last_token_looks_at():
    expected = attention(view())[:, -1].mean(axis=0)
    np.testing.assert_allclose(score.tova(view()), expected, rtol=1e-5, atol=1e-7)


def test_short_keys_and_late_tokens_rank_first():
    norms = [-np.mean([math.sqrt(float(key @ key)) for key in view().keys[:, row]]) for row in range(ROWS)]
    np.testing.assert_allclose(score.key_norm(view()), norms, rtol=1e-5)
    assert score.recency(view()).argsort()[-3:].tolist() == [20, 21, 22]


@pytest.mark.parametrize("method", EVICTIONS)
def test_every_measure_gives_each_row_a_number_and_changes_nothing(method):
    seen, queries = view(), statistics()
    scorer = score.ExpectedAttention(SPEC, queries.mean, queries.covariance) if method == "expected" else PLAIN[method]
    before = seen.keys.copy(), seen.values.copy(), seen.queries.copy()

    found = scorer(seen)

    assert found.shape == (ROWS,)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, scorer(seen))
    for held, copy in zip((seen.keys, seen.values, seen.queries), before, strict=True):
        np.testing.assert_array_equal(held, copy)


def test_statistics_come_back_as_they_were_written(tmp_path):
    queries = statistics()
    queries.write(tmp_path / "q.npz")
    found = Queries.read(tmp_path / "q.npz", queries.mean.shape)
    np.testing.assert_array_equal(found.covariance, queries.covariance)
    queries.write(tmp_path / "again.npz")
    assert (tmp_path / "q.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()


def test_statistics_of_another_model_or_of_none_are_refused(tmp_path):
    statistics().write(tmp_path / "q.npz")
    with pytest.raises(BundleError, match="the model has"):
        Queries.read(tmp_path / "q.npz", (9, HEADS, DIM))
    (tmp_path / "no.npz").write_bytes(b"nothing")
    with pytest.raises(BundleError, match="no statistics"):
        Queries.read(tmp_path / "no.npz", (2, HEADS, DIM))
