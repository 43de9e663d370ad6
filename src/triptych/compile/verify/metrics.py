"""The figures that say how far one array, or one set of next-token distributions, lies from its twin.

Everything is computed in float64, and a figure that cannot be computed is NaN, which meets no gate.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import Array

MAX_DB = 200.0  # equal arrays: JSON knows no infinity
BLOCK_ROWS = 64  # of logits turned into float64 at once

_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")  # a bad number becomes a NaN figure, no warning


@_quiet
def cosine(twin: Array, tested: Array) -> float:
    """Cosine of the angle between two arrays of any one shape: 1 where both are zero, 0 where one is."""
    a, b = _flat(twin, tested)
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    if lengths == 0.0:
        return float(np.linalg.norm(a) == np.linalg.norm(b))
    return float(np.dot(a, b) / lengths)


@_quiet
def worst_cosine(twin: Array, tested: Array) -> float:
    """The smallest `cosine` of any row (last axis): one token that went astray is not averaged away."""
    a, b = _rows(twin), _rows(tested)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = (a * b).sum(axis=1)
    both_zero = ~a.any(axis=1) & ~b.any(axis=1)
    cosines = np.where(lengths > 0.0, dots / lengths, np.where(both_zero, 1.0, 0.0))
    return float(np.where(np.isfinite(lengths), cosines, np.nan).min(initial=1.0))


@_quiet
def sqnr_db(twin: Array, tested: Array) -> float:
    """Signal to quantization-noise ratio in dB: 10·log10(‖twin‖² / ‖twin − tested‖²), within ±MAX_DB."""
    a, b = _flat(twin, tested)
    return decibels(float(np.dot(a, a)), float(np.dot(a - b, a - b)))


def decibels(signal: float, noise: float) -> float:
    """10·log10(signal / noise) of two energies, within ±MAX_DB."""
    if not np.isfinite(signal + noise):
        return float("nan")
    if noise == 0.0:
        return MAX_DB
    if signal == 0.0:
        return -MAX_DB
    return float(np.clip(10.0 * np.log10(signal / noise), -MAX_DB, MAX_DB))


@_quiet
def kl_divergence(twin: Array, tested: Array) -> NDArray[np.float64]:
    """KL(twin ‖ tested) in nats for each row of logits: (R, V) and (R, V) → (R,)."""
    out = np.empty(len(twin))
    for rows in _blocks(len(twin)):
        a, b = log_softmax(twin[rows]), log_softmax(tested[rows])
        out[rows] = (np.exp(a) * (a - b)).sum(axis=1)
    return np.maximum(out, 0.0)  # rounding may take an exact zero a hair below; NaN stays NaN


def information(logits: Array) -> float:
    """How much the rows' distributions differ from their mean, in nats: the most that there is to lose.

    The Jensen–Shannon divergence of all rows, H(mean p) − mean H(p). A divergence of a few percent of it is small
    for a trained model and for one with random weights, whose distributions are all nearly flat.
    """
    mean = np.zeros(logits.shape[1])
    entropy = 0.0
    for rows in _blocks(len(logits)):
        log_p = log_softmax(logits[rows])
        p = np.exp(log_p)
        mean += p.sum(axis=0)
        entropy -= float((p * log_p).sum())
    mean /= len(logits)
    known = mean > 0.0
    return float(-(mean[known] * np.log(mean[known])).sum() - entropy / len(logits))


def same_top(twin: Array, tested: Array) -> NDArray[np.bool_]:
    """Whether each row of logits has the same most likely token: (R, V) and (R, V) → (R,)."""
    return np.asarray(twin.argmax(axis=1) == tested.argmax(axis=1), np.bool_)


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Natural-log probabilities of each row, in float64."""
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _blocks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_ROWS) for start in range(0, num_rows, BLOCK_ROWS))


def _flat(twin: Array, tested: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    assert twin.shape == tested.shape, f"{twin.shape} against {tested.shape}"
    return twin.astype(np.float64).ravel(), tested.astype(np.float64).ravel()


def _rows(array: Array) -> NDArray[np.float64]:
    return array.astype(np.float64).reshape(-1, array.shape[-1])
