"""A curve that only rises, or only falls, through measured points; nothing beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from triptych.errors import ConfigError
from triptych.plan.extra import extra

Curve = Callable[[ArrayLike], NDArray[np.float64]]


def isotonic(values: ArrayLike, *, rises: bool = True) -> NDArray[np.float64]:
    """The nearest monotone values along the last axis, by least squares.

    Each is the greatest, over where a run may begin, of the least mean that a run from there beyond it has
    (Robertson, Wright and Dykstra, 1988): all rows at once, where pooling violators goes row by row.
    """
    rows = np.asarray(values, np.float64) * (1 if rises else -1)
    size = rows.shape[-1]
    total = np.concatenate([np.zeros((*rows.shape[:-1], 1)), rows.cumsum(axis=-1)], axis=-1)
    begin, end = np.indices((size, size))
    means = (total[..., None, 1:] - total[..., :-1, None]) / np.maximum(end - begin + 1, 1)
    least = np.minimum.accumulate(np.where(end >= begin, means, np.inf)[..., ::-1], axis=-1)[..., ::-1]
    found: NDArray[np.float64] = np.where(begin <= end, least, -np.inf).max(axis=-2)
    return found if rises else -found


def through(sizes: Sequence[float], values: ArrayLike) -> Curve:
    """Monotone between monotone points (Fritsch and Carlson, 1980). sizes: ascending, two or more; values: (…, sizes).

    The curve raises ConfigError for a size below the first or beyond the last.
    """
    low, high = sizes[0], sizes[-1]
    between = extra("scipy.interpolate").PchipInterpolator(sizes, values, axis=-1, extrapolate=False)

    def at(size: ArrayLike) -> NDArray[np.float64]:
        wanted = np.asarray(size, np.float64)
        if wanted.size and not (low <= wanted.min() and wanted.max() <= high):
            raise ConfigError(
                f"measured from {low:g} to {high:g}, asked for {wanted.min():g} to {wanted.max():g}",
                hint="nothing is extrapolated: measure there too",
            )
        found: NDArray[np.float64] = between(wanted)
        return found

    return at
