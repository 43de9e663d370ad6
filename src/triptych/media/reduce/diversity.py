"""Rows that differ from one another and from what all share, with or without an eye on the question."""

from __future__ import annotations

import numpy as np

from triptych.media.reduce.run import Floats, Indices, Run, directions, spread

TINY = 1e-6  # squared volume below which a row adds nothing that is not there already
RELEVANCE = 0.5  # OpenVINO GenAI's default: the most relevant row weighs e^0.5 times the least
STRETCH = 640  # rows that are weighed against one another: choosing among n takes n³/8 steps


def cenprune(run: Run, count: int) -> Indices:
    """Centred diversity (Cen-Prune, 2026): the most volume of centred rows, each weighted by its distinctiveness.

    Centring takes away the direction that all rows of a tower share, which makes all cosines high; distinctiveness
    is how far a row is, uncentred, from the others' mean direction. Of equal rows the first stays.
    """
    return _choose(run.rows, np.ones(len(run.rows), np.float32), count)


def cdpruner(run: Run, count: int) -> Indices:
    """The same, weighted by relevance to the question too (CDPruner, NeurIPS 2025, with Cen-Prune's weights).

    The paper asks CLIP's text tower how relevant a row is. There is none here, so a row's relevance is its mean cosine
    with the decoder's own embeddings of the question, as in OpenVINO GenAI.
    """
    relevance = np.zeros(len(run.rows), np.float32)
    if len(run.question):
        relevance = spread(directions(run.rows) @ directions(run.question).mean(axis=0))
    return _choose(run.rows, np.exp(RELEVANCE * relevance), count)


def _choose(rows: Floats, weights: Floats, count: int) -> Indices:
    ways = directions(rows)
    weights = np.maximum(weights * spread(-(ways @ ways.sum(axis=0))), TINY)
    features = directions(rows - rows.mean(axis=0)) * weights[:, None]
    edges = np.linspace(0, len(rows), -(-len(rows) // STRETCH) + 1).round().astype(np.int32)
    shares = (edges * count / len(rows)).round().astype(np.int32)
    chosen = [
        edge + most_volume(features[edge:end] @ features[edge:end].T, share)
        for edge, end, share in zip(edges, edges[1:], np.diff(shares), strict=False)
    ]
    return np.concatenate(chosen)


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
        if volumes[best] <= floor:
            factors[at] = 0
            continue
        factors[at] = (kernel[best] - factors[:at, best] @ factors[:at]) / np.sqrt(volumes[best])
        volumes -= factors[at] ** 2
    return chosen
