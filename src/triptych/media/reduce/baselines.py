"""What every method must beat: a uniform grid, average pooling, chance."""

from __future__ import annotations

import math

import numpy as np

from triptych.media.reduce.run import Floats, Indices, Run


def grid(run: Run, count: int) -> Indices:
    """The middle row of each bin."""
    return np.array([own[len(own) // 2] for own in bins(len(run.rows), count)], np.int32)


def pool(run: Run, count: int) -> tuple[Floats, Indices]:
    """The mean of each bin, at the place of its middle row."""
    own = sorted(bins(len(run.rows), count), key=lambda rows: rows[len(rows) // 2])
    means = np.stack([run.rows[rows].mean(axis=0) for rows in own])
    return means, np.array([rows[len(rows) // 2] for rows in own], np.int32)


def random(run: Run, count: int) -> Indices:
    """Chance, the same for the same item."""
    return np.random.default_rng(run.seed).permutation(len(run.rows))[:count].astype(np.int32)


def bins(num_rows: int, count: int) -> list[Indices]:
    """`num_rows` places in `count` even bins: blocks of the square where it is one and they fit, else stretches."""
    side = math.isqrt(num_rows)
    down = max((d for d in range(1, side + 1) if count % d == 0 and count // d <= side), default=0)
    if side * side != num_rows or down == 0 or 2 * down < count // down:
        return list(np.array_split(np.arange(num_rows, dtype=np.int32), count))
    square = np.arange(num_rows, dtype=np.int32).reshape(side, side)
    lines = np.array_split(square, count // down, axis=0)
    return [block.ravel() for line in lines for block in np.array_split(line, down, axis=1)]
