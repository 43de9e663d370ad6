"""How far a position turns each pair of a head's numbers, and the tables that turn them back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.spec import RopeSpec

Array = NDArray[Any]


def rope_frequencies(spec: RopeSpec, head_dim: int) -> NDArray[np.float32]:
    """Radians a position turns each pair of a head's numbers, (head_dim / 2,), after scaling."""
    frequencies = 1.0 / spec.theta ** (np.arange(0, head_dim, 2) / head_dim)
    match spec.scaling:
        case "none":
            pass
        case "linear":
            frequencies = frequencies / spec.factor
        case "llama3":
            turns = spec.original_positions * frequencies / (2 * np.pi)
            share = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
            share = np.clip(share, 0.0, 1.0)
            frequencies = frequencies * (share + (1 - share) / spec.factor)
    return frequencies.astype(np.float32)


def turn(x: Array, cos: Array, sin: Array) -> Array:
    """Turn each pair (i, i + head_dim / 2) of x (…, head_dim) by an angle of that cosine and sine; -sin turns back."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
