"""Fit what steps cost to steps that were measured: monotone in each size, by relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from triptych.core.curve import step_s
from triptych.core.device import CostPoint, StepCost
from triptych.core.spec import Fact
from triptych.errors import MeasurementError
from triptych.plan.extra import extra

Floats = NDArray[np.float64]
LEAST_CACHED = 256  # tokens
NINE_OF_TEN = 0.9
MOST_ERROR = 0.3  # of three steps in four, or they contradict one another


class SeenStep(Fact, frozen=True, kw_only=True):
    """Steps alike, measured: `answers` with `cached` tokens in all, and `prompt` tokens after `earlier` ones."""

    answers: int = 0
    cached: int = 0
    prompt: int = 0
    earlier: int = 0
    seconds: tuple[float, ...]

    @property
    def middle_s(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a fit is of."""

    device: str
    weights_digest: str
    settings: str


def fit_costs(steps: Sequence[SeenStep], tiles: Sequence[CostPoint], of: Fitted) -> StepCost:
    """Least squares of relative errors over `decode + cached + prefill + pairs`, none of whose curves may fall.

    An isotonic regression of a sum of curves: what is solved for are their rises, and none is negative. Raises
    MeasurementError for too few steps, or such as contradict one another; ConfigError without scipy.
    """
    knots = {
        "decode": sorted({max(step.answers, 1) for step in steps}),
        "cached": _few({step.cached for step in steps if step.cached}),
        "prefill": sorted({step.prompt for step in steps if step.prompt}),
    }
    if not knots["decode"] or not knots["prefill"]:
        raise MeasurementError(f"{len(steps)} steps were measured, of prompts and of answers are needed")
    rows = [[*_row(step, knots), step.prompt * step.earlier] for step in steps]
    found = relative_nnls(np.array(rows, float), np.array([step.middle_s for step in steps]))
    curves: dict[str, tuple[CostPoint, ...]] = {}
    at = 0
    for name, sizes in knots.items():
        curves[name] = points(sizes, np.cumsum(found[at : at + len(sizes)]), _spread(steps))
        at += len(sizes)
    if curves["cached"]:
        curves["cached"] = (CostPoint(size=0, seconds=0.0, lowest_s=0.0, highest_s=0.0), *curves["cached"])
    mean = curves["cached"][-1].seconds / curves["cached"][-1].size if curves["cached"] else 0.0
    cost = StepCost(
        device=of.device,
        weights_digest=of.weights_digest,
        settings=of.settings,
        **curves,
        cached_token_s=mean,
        pair_s=float(found[-1]),
        tiles=tuple(tiles),
        error=0.0,
    )
    return msgspec.structs.replace(cost, error=_error(cost, steps))


def _error(cost: StepCost, steps: Sequence[SeenStep]) -> float:
    """Of nine of ten samples. Raises MeasurementError where a quarter of the steps do not agree with the others."""
    told = [step_s(cost, step.answers, step.cached, step.prompt, step.earlier) for step in steps]
    worse = float(np.quantile([abs(s / step.middle_s - 1) for s, step in zip(told, steps, strict=True)], 0.75))
    if worse > MOST_ERROR:
        raise MeasurementError(
            f"a quarter of the steps are more than {worse:.0%} from what the others say of them",
            hint="measure again while nothing else runs",
        )
    errors = [abs(s / sample - 1) for s, step in zip(told, steps, strict=True) for sample in step.seconds]
    return float(np.quantile(errors, NINE_OF_TEN))


def relative_nnls(rows: Floats, seconds: Floats) -> Floats:
    """The least squares of relative errors with no negative term. Raises ConfigError without scipy."""
    nnls = extra("scipy.optimize").nnls
    scaled = rows / seconds[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    found: Floats = nnls(scaled / norms, np.ones(len(seconds)), maxiter=100 * rows.shape[1])[0] / norms
    return found


def rises(size: float, knots: Sequence[float]) -> list[float]:
    """How much of each knot's rise a size has had: 1 before it, 0 after it, a share between two."""
    befores = [0.0, *knots[:-1]]
    return [min(1.0, max(0.0, (size - low) / (high - low))) for low, high in zip(befores, knots, strict=True)]


def risen(size: float, knots: Sequence[float]) -> list[float]:
    """As `rises`, but the first knot's whole height is there from the beginning."""
    first, *later = knots
    return [1.0, *rises(size - first, [knot - first for knot in later])]


def _row(step: SeenStep, knots: dict[str, list[int]]) -> list[float]:
    decode = risen(max(step.answers, 1), knots["decode"])
    return decode + rises(step.cached, knots["cached"]) + rises(step.prompt, knots["prefill"])


def _few(sizes: set[int]) -> list[int]:
    """Knots of the curve over the cache: a quarter of the next each, down to where a batch's own cost hides it."""
    found = [max(sizes)] if sizes else []
    while found and found[-1] // 4 >= LEAST_CACHED:
        found.append(found[-1] // 4)
    return found[::-1]


def _spread(steps: Sequence[SeenStep]) -> tuple[float, float]:
    """The least and the most of a step's samples over their median, in the middle of all steps."""
    each = [(min(step.seconds) / step.middle_s, max(step.seconds) / step.middle_s) for step in steps]
    return median(low for low, _ in each), median(high for _, high in each)


def points(sizes: Sequence[float], seconds: Floats, spread: tuple[float, float]) -> tuple[CostPoint, ...]:
    low, high = spread
    return tuple(
        CostPoint(size=size, seconds=s, lowest_s=s * low, highest_s=s * high)
        for size, s in zip(sizes, seconds.tolist(), strict=True)
    )
