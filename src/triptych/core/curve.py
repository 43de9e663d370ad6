"""Read a measured curve between its points, and nowhere else."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from triptych.core.device import CostPoint, StepCost
from triptych.errors import ConfigError


def seconds_at(points: Sequence[CostPoint], size: float) -> float:
    """Monotone cubic interpolation (PCHIP: Fritsch and Butland, 1984), as scipy's, so that serving needs no scipy.

    Below the first point it is the first one's. Raises ConfigError beyond the last: nothing was measured there.
    """
    if not points:
        raise ConfigError("a step's cost has no points", hint="measure it: `triptych plan BUNDLE --fit`")
    if size > points[-1].size:
        raise ConfigError(
            f"steps were measured up to a size of {points[-1].size:,g}, not {size:,g}",
            hint="ask for less at once, or measure larger steps",
        )
    if size <= points[0].size:
        return points[0].seconds
    at = min(bisect_right([point.size for point in points], size), len(points) - 1)
    low, high = points[at - 1], points[at]
    width = high.size - low.size
    share = (size - low.size) / width
    slopes = [_slope(points, index) * width for index in (at - 1, at)]
    return (
        low.seconds * (1 + 2 * share) * (1 - share) ** 2
        + high.seconds * share**2 * (3 - 2 * share)
        + slopes[0] * share * (1 - share) ** 2
        - slopes[1] * share**2 * (1 - share)
    )


def step_s(cost: StepCost, answers: int, cached: int = 0, prompt: int = 0, earlier: int = 0) -> float:
    """Seconds of one step. `cached`: tokens of all answers; `earlier`: tokens computed before each of `prompt`'s.

    Raises ConfigError beyond what was measured. A step without answers costs at least what reading the weights does.
    """
    seconds = seconds_at(cost.decode, max(answers, 1))
    if cached:
        seconds += seconds_at(cost.cached, cached) if cost.cached else cached * cost.cached_token_s
    return seconds + (seconds_at(cost.prefill, prompt) + prompt * earlier * cost.pair_s if prompt else 0.0)


def _slope(points: Sequence[CostPoint], index: int) -> float:
    """Of the curve at a point: a weighted harmonic mean of the two sides', none where they disagree."""
    if len(points) < 2:
        return 0.0
    if index in (0, len(points) - 1):
        return _end_slope(points if index == 0 else points[::-1])
    width = [points[index + side].size - points[index - 1 + side].size for side in (0, 1)]
    rise = [(points[index + side].seconds - points[index - 1 + side].seconds) / width[side] for side in (0, 1)]
    if rise[0] * rise[1] <= 0:
        return 0.0
    weight = [2 * width[1] + width[0], width[1] + 2 * width[0]]
    return sum(weight) / (weight[0] / rise[0] + weight[1] / rise[1])


def _end_slope(points: Sequence[CostPoint]) -> float:
    """At the first of them: a parabola's through three points, kept from turning round."""
    width = [points[index + 1].size - points[index].size for index in range(min(2, len(points) - 1))]
    rise = [(points[index + 1].seconds - points[index].seconds) / width[index] for index in range(len(width))]
    if len(width) == 1:
        return rise[0]
    slope = ((2 * width[0] + width[1]) * rise[0] - width[0] * rise[1]) / (width[0] + width[1])
    if slope * rise[0] <= 0:
        return 0.0
    if rise[0] * rise[1] <= 0 and abs(slope) > 3 * abs(rise[0]):
        return 3 * rise[0]
    return slope
