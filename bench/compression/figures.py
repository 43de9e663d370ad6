"""How far two distributions, or two columns of answers, are apart: divergence, intervals, flips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
Z95 = 1.96


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """(rows, vocab) natural-log probabilities."""
    high = logits.astype(np.float64)
    high -= high.max(-1, keepdims=True)
    high -= np.log(np.exp(high).sum(-1, keepdims=True))
    return high


def divergence(reference: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """KL(reference ‖ other) in nats of each row of logits, and whether both have the same top token.

    Of one vocabulary: whatever one runtime has beyond the other's width (padding) is left out of both.
    """
    width = min(reference.shape[-1], other.shape[-1])
    first, second = log_softmax(reference[:, :width]), log_softmax(other[:, :width])
    kld = (np.exp(first) * (first - second)).sum(-1)
    return kld, first.argmax(-1) == second.argmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A set of rows' divergences, in nats; `same_top` is a share."""

    mean: float
    median: float
    p99: float
    same_top: float
    num_rows: int


def spread(klds: Sequence[float], tops: Sequence[bool]) -> Spread:
    values = np.asarray(klds, np.float64)
    return Spread(
        mean=float(values.mean()),
        median=float(np.median(values)),
        p99=float(np.quantile(values, 0.99)),
        same_top=float(np.mean(tops)),
        num_rows=len(values),
    )


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    share, z = right / total, Z95
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return middle - half, middle + half


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Accuracy against a reference's on the same questions. `retention` is a ratio with its bootstrapped interval.

    flips: share of questions whose verdict changed, either way (arXiv:2407.09141). lost, won: their numbers.
    """

    right: int
    total: int
    low: float
    high: float
    retention: float
    retention_low: float
    retention_high: float
    flips: float
    lost: int
    won: int


def held(rights: Sequence[bool], reference: Sequence[bool], clusters: Sequence[str]) -> Held:
    """Paired over questions; whole clusters are drawn, since questions of one conversation are no independent ones."""
    ours, theirs = np.asarray(rights, bool), np.asarray(reference, bool)
    low, high = wilson(int(ours.sum()), len(ours))
    ratios = _bootstrap(ours, theirs, clusters)
    return Held(
        right=int(ours.sum()),
        total=len(ours),
        low=low,
        high=high,
        retention=float(ours.sum() / max(theirs.sum(), 1)),
        retention_low=float(np.quantile(ratios, 0.025)),
        retention_high=float(np.quantile(ratios, 0.975)),
        flips=float((ours != theirs).mean()),
        lost=int((theirs & ~ours).sum()),
        won=int((ours & ~theirs).sum()),
    )


def _bootstrap(ours: NDArray[np.bool_], theirs: NDArray[np.bool_], clusters: Sequence[str]) -> NDArray[np.float64]:
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.stack([np.bincount(index, column, len(names)) for column in (ours, theirs)])
    drawn = np.random.default_rng(0).integers(0, len(names), (RESAMPLES, len(names)))
    mine, reference = sums[:, drawn].sum(-1)
    return np.asarray(mine / np.maximum(reference, 1))
