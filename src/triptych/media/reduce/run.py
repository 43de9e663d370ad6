"""What a method is given: one run of rows, with all that it may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rows that stand together in a prompt.

    rows: (n, d), as the projector gives them. question: (q, d), the decoder's embeddings of the question's tokens;
    empty for a method that does not look at it. seed: the same for the same item.
    """

    rows: Floats
    question: Floats
    seed: int


class Method(Protocol):
    def __call__(self, run: Run, count: int) -> tuple[Floats, Indices]:
        """`count` rows, 1 ≤ count < n, and for each the row of the run whose position it takes: ascending, distinct."""


class Select(Protocol):
    def __call__(self, run: Run, count: int) -> Indices:
        """Which `count` rows stay as they are, in any order."""


def keeping(select: Select) -> Method:
    """The method that keeps what `select` chooses, in the order of the prompt."""

    def method(run: Run, count: int) -> tuple[Floats, Indices]:
        kept = np.sort(select(run, count)).astype(np.int32)
        return run.rows[kept], kept

    return method


def directions(rows: Floats) -> Floats:
    """Rows of length one; a row of zeros stays zeros, so that its cosine with anything is 0."""
    even: Floats = rows / (np.abs(rows).max() or np.float32(1))  # so that no square overflows
    lengths: Floats = np.sqrt(np.einsum("nd,nd->n", even, even))
    lengths[lengths == 0] = 1
    even /= lengths[:, None]
    return even


def spread(values: Floats) -> Floats:
    """Moved and scaled to fill [0, 1]; values that are all alike become 1."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.ones_like(values)
