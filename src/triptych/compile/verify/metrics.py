"""How far one array, or one set of next-token distributions, lies from its twin.

Everything is computed in float64, and a figure that cannot be computed is NaN, which meets no gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import Array

MAX_DB = 200.0  # equal arrays: JSON knows no infinity
BLOCK_ROWS = 64  # of logits turned into float64 at once

_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")  # a bad number becomes a NaN figure, no warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How alike two arrays are; the last axis makes a row.

    cosine: of the angle between the two as a whole, 1 where both are zero, 0 where one is. worst_cosine: the
    smallest of any row, so that one token that went astray is not averaged away. sqnr_db: signal to
    quantization-noise ratio, 10·log10(‖twin‖² / ‖twin − tested‖²).
    """

    cosine: float
    worst_cosine: float
    sqnr_db: float


@_quiet
def likeness(twin: Array, tested: Array) -> Likeness:
    """Compare two arrays of one shape, in one pass over their rows."""
    assert twin.shape == tested.shape, f"{twin.shape} against {tested.shape}"
    a, b = twin.reshape(-1, twin.shape[-1]), tested.reshape(-1, tested.shape[-1])
    sums = np.empty((4, len(a)))  # of each row: twin², tested², their product, noise²
    for rows in _blocks(len(a)):
        x, y = a[rows].astype(np.float64), b[rows].astype(np.float64)
        for index, (left, right) in enumerate(((x, x), (y, y), (x, y), (x - y, x - y))):
            sums[index, rows] = np.einsum("rv,rv->r", left, right)
    total = sums.sum(axis=1)
    return Likeness(
        cosine=float(_cosine(*total[:3])),
        worst_cosine=float(_cosine(*sums[:3]).min(initial=1.0)),
        sqnr_db=decibels(float(total[0]), float(total[3])),
    )


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


def _cosine(first: Any, second: Any, product: Any) -> Any:
    """Of energies and products; NaN where one is no number."""
    lengths = np.sqrt(first * second)
    is_zero = np.where((first == 0.0) & (second == 0.0), 1.0, 0.0)
    found = np.where(lengths > 0.0, product / lengths, is_zero)
    return np.where(np.isfinite(lengths), found, np.nan)


def _blocks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_ROWS) for start in range(0, num_rows, BLOCK_ROWS))
