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
    """`num_rows` places in `count` even bins: blocks of a square where that fits, else stretches."""
    side = math.isqrt(num_rows)
    columns = max(d for d in range(1, math.isqrt(count) + 1) if count % d == 0)
    lines = count // columns
    if side * side != num_rows or lines > min(side, 2 * columns):
        return list(np.array_split(np.arange(num_rows, dtype=np.int32), count))
    square = np.arange(num_rows, dtype=np.int32).reshape(side, side)
    parts = np.array_split(square, lines, axis=0)
    return [block.ravel() for part in parts for block in np.array_split(part, columns, axis=1)]
