"""What attention says may be left out, and how well that predicts the loss which is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.core.spec import Fact


class KeepPoint(Fact, frozen=True, kw_only=True):
    """One sample with a share of its media tokens kept: the measured loss, and what was said before.

    shortfall: 1 − keep / wanted, of the share that the effective number asks for; 0 where that is kept. lost: of a
    text row's attention, what went to the tokens that were dropped, mean over layers.
    """

    sample: str
    keep: float
    divergence: float  # mean KL from all tokens kept, nats an answer token
    same_top: float
    shortfall: float
    lost: float


class Prediction(Fact, frozen=True, kw_only=True):
    """Spearman's rank correlation with the measured loss: over all samples and ratios, and over the samples of one
    ratio (mean of the ratios); None where there is too little to rank.
    """

    name: str
    overall: float | None
    within: float | None


READINGS: dict[str, Callable[[KeepPoint], float]] = {
    "effective number": lambda point: point.shortfall,
    "attention lost": lambda point: point.lost,
    "ratio alone": lambda point: 1 - point.keep,  # what any method says without looking
}


def wanted_keep(received: Sequence[float]) -> float | None:
    """exp(H) / n of the attention that a picture's tokens get from all rows, heads and layers together.

    One row's effective number asks for too little: rows look at different tokens (docs/journal.md).
    """
    shares = np.array(received)
    if not shares.sum():
        return None
    shares = shares[shares > 0] / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum())) / len(received)


def predictions(points: Sequence[KeepPoint]) -> tuple[Prediction, ...]:
    ratios = sorted({point.keep for point in points})
    found = []
    for name, read in READINGS.items():
        within = [_follows([point for point in points if point.keep == keep], read) for keep in ratios]
        known = [rho for rho in within if rho is not None]
        mean = sum(known) / len(known) if known else None
        found.append(Prediction(name=name, overall=_follows(points, read), within=mean))
    return tuple(found)


def verdict(found: Sequence[Prediction]) -> str:
    """How far the proposal may be trusted, in words."""
    rho = {one.name: one for one in found}
    ours, alone = rho.get("effective number"), rho.get("ratio alone")
    if ours is None or alone is None or ours.overall is None or alone.overall is None:
        return "Too few samples to tell how well attention predicts the loss: go by the measured loss alone."
    within = "cannot be ranked" if ours.within is None else f"ρ {ours.within:+.2f}"
    if ours.overall < alone.overall + 0.02 and (ours.within or 0.0) < 0.3:
        return (
            f"The proposal predicts badly: ρ {ours.overall:+.2f} with the measured loss, the ratio alone "
            f"{alone.overall:+.2f}; samples at one ratio: {within}. Choose by the measured loss."
        )
    return (
        f"The effective number ranks the losses at ρ {ours.overall:+.2f}, the ratio alone at {alone.overall:+.2f}; "
        f"samples at one ratio: {within}."
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's, equals sharing their mean rank; None under four pairs, or where one side is all alike."""
    if len(first) < 4 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return means[places]


def _follows(points: Sequence[KeepPoint], read: Callable[[KeepPoint], float]) -> float | None:
    return rank_correlation([read(point) for point in points], [point.divergence for point in points])
