"""Rows that differ from one another: centred max-min diversity, and determinants that heed the question."""

from __future__ import annotations

import numpy as np

from triptych.media.reduce.run import Floats, Indices, Run, directions, spread

TINY = 1e-6  # squared volume below which a row adds nothing that is not there already


def cenprune(run: Run, count: int) -> Indices:
    """DivPrune's greedy max-min distance (CVPR 2025) on centred rows, weighted by distinctiveness (Cen-Prune, 2026).

    Centring takes away the direction that all rows of a tower share, which makes all cosines high; distinctiveness
    is how far a row is, uncentred, from the others' mean direction.
    """
    ways, centred = directions(run.rows), directions(run.rows - run.rows.mean(axis=0))
    distinct = spread(-(ways @ ways.sum(axis=0)))
    return farthest(1 - centred @ centred.T, distinct, count)


def farthest(distances: Floats, weights: Floats, count: int) -> Indices:
    """Greedily the row with the largest weight × distance to its nearest chosen row. distances: (n, n).

    First comes the row whose nearest neighbour is farthest. With equal weights the smallest distance between two
    chosen rows is at least half of the best possible (Gonzalez 1985).
    """
    among = distances.copy()
    np.fill_diagonal(among, np.inf)
    nearest = among.min(axis=1)
    chosen = np.empty(count, np.int32)
    for at in range(count):
        gains = weights * nearest
        gains[chosen[:at]] = -np.inf
        chosen[at] = gains.argmax()
        nearest = distances[chosen[0]].copy() if at == 0 else np.minimum(nearest, distances[chosen[at]])
    return chosen


def cdpruner(run: Run, count: int) -> Indices:
    """The most probable rows of a determinantal point process that also heeds the question (CDPruner, NeurIPS 2025).

    The paper asks CLIP's text tower how relevant a row is. There is none here, so a row's relevance is its mean cosine
    with the decoder's own embeddings of the question, as in OpenVINO GenAI.
    """
    ways = directions(run.rows)
    relevance = spread(ways @ directions(run.question).mean(axis=0)) if len(run.question) else np.ones(len(ways))
    weighted = ways * np.maximum(relevance, TINY)[:, None].astype(np.float32)
    return most_volume(weighted @ weighted.T, count)


def most_volume(kernel: Floats, count: int) -> Indices:
    """Greedily the rows with the largest determinant of `kernel`, (n, n) and positive semidefinite (Chen et al. 2018).

    Once no row adds volume, those with the largest diagonal follow.
    """
    volumes = kernel.diagonal().astype(np.float64)
    others = volumes - volumes.max() - 1  # negative, in the diagonal's order
    floor = TINY * max(volumes.max(), TINY)
    factors = np.empty((count, len(kernel)), np.float32)
    chosen = np.empty(count, np.int32)
    for at in range(count):
        gains = np.where(volumes > floor, volumes, others)
        gains[chosen[:at]] = -np.inf
        best = chosen[at] = gains.argmax()
        if volumes[best] > floor:
            factors[at] = (kernel[best] - factors[:at, best] @ factors[:at]) / np.sqrt(volumes[best])
            volumes -= factors[at] ** 2
        else:
            factors[at] = 0
    return chosen
