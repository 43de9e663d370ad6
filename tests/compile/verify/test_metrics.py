"""Figures: each equal to its plain form, and none that a broken array can satisfy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.compile.verify import metrics

SEEDS = st.integers(0, 2**32 - 1)


def pair(seed, shape=(7, 11), noise=0.1):
    random = np.random.default_rng(seed)
    twin = random.standard_normal(shape).astype(np.float32) * 3
    return twin, (twin + noise * random.standard_normal(shape)).astype(np.float32)


def plain_cosine(a, b):
    return float(
        a.astype(float) @ b.astype(float) / np.sqrt((a.astype(float) ** 2).sum() * (b.astype(float) ** 2).sum())
    )


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_cosine_and_sqnr_equal_their_plain_forms(seed):
    twin, tested = pair(seed)
    a = [float(x) for x in twin.ravel()]
    b = [float(x) for x in tested.ravel()]

    dot = sum(x * y for x, y in zip(a, b, strict=True))
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(y * y for y in b))
    noise = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    found = metrics.likeness(twin, tested)
    assert found.cosine == pytest.approx(dot / lengths, rel=1e-12)
    assert found.sqnr_db == pytest.approx(10 * math.log10(sum(x * x for x in a) / noise), rel=1e-9)
    assert found.worst_cosine == pytest.approx(min(map(plain_cosine, twin, tested)), rel=1e-12)


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_kl_divergence_equals_its_plain_form(seed):
    twin, tested = pair(seed, shape=(metrics.BLOCK_ROWS + 3, 5), noise=1.0)

    plain = []
    for row, other in zip(twin.astype(float), tested.astype(float), strict=True):
        p = np.exp(row) / np.exp(row).sum()
        q = np.exp(other) / np.exp(other).sum()
        plain.append(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))

    np.testing.assert_allclose(metrics.kl_divergence(twin, tested), plain, rtol=1e-7, atol=1e-12)


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_information_is_the_mean_divergence_from_the_mean_distribution(seed):
    logits, _ = pair(seed, shape=(metrics.BLOCK_ROWS + 3, 5))
    p = np.exp(logits.astype(float))
    p /= p.sum(axis=1, keepdims=True)

    plain = (p * np.log(p / p.mean(axis=0))).sum(axis=1).mean()

    assert metrics.information(logits) == pytest.approx(plain, rel=1e-9)


def test_figures_of_equal_arrays_are_perfect():
    twin, _ = pair(0)

    found = metrics.likeness(twin, twin)

    assert found.cosine == pytest.approx(1.0)
    assert found.worst_cosine == pytest.approx(1.0)
    assert found.sqnr_db == metrics.MAX_DB
    assert metrics.kl_divergence(twin, twin).max() == 0.0
    assert metrics.same_top(twin, twin).all()


def test_the_worst_row_is_not_averaged_away():
    twin, _ = pair(0, shape=(500, 8))
    tested = twin.copy()
    tested[17] = -tested[17]

    found = metrics.likeness(twin, tested)

    assert found.cosine > 0.99
    assert found.worst_cosine == pytest.approx(-1.0)


def test_an_array_of_zeros_resembles_nothing_but_zeros():
    twin, _ = pair(0)
    zeros = np.zeros_like(twin)

    assert metrics.likeness(twin, zeros).cosine == metrics.likeness(twin, zeros).worst_cosine == 0.0
    assert metrics.likeness(zeros, twin).sqnr_db == -metrics.MAX_DB
    assert metrics.likeness(zeros, zeros) == metrics.Likeness(cosine=1.0, worst_cosine=1.0, sqnr_db=metrics.MAX_DB)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_no_number_gives_no_figure(bad):
    twin, tested = pair(0)
    tested[3, 4] = bad

    found = metrics.likeness(twin, tested)

    assert math.isnan(found.cosine)
    assert math.isnan(found.worst_cosine)
    assert math.isnan(found.sqnr_db)
    assert math.isnan(metrics.kl_divergence(twin, tested)[3])


def test_logits_of_any_size_give_finite_divergences():
    twin = np.array([[1e4, 0.0, -1e4]], np.float32)

    assert metrics.kl_divergence(twin, twin[:, ::-1].copy())[0] == pytest.approx(2e4)
