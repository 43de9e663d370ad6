"""Merge rows that are alike: Token Merging (ICLR 2023), until as many are left as wanted."""

from __future__ import annotations

import numpy as np

from triptych.media.reduce.run import Floats, Indices, Run, directions

ROUND = 8  # the paper merges few rows in each of many layers, so that the most alike come first wherever they stand


def tome(run: Run, count: int) -> tuple[Floats, Indices]:
    """Round by round the rows at odd places take in the most alike of those at even places, an eighth of all at most.

    A merged row is the mean of all it was made of, at the place of the first of them. The paper merges by the keys of
    a layer, and tells attention how many rows each stands for; here are neither, so rows themselves are compared.
    """
    rows, sizes, places = run.rows, np.ones(len(run.rows), np.float32), np.arange(len(run.rows), dtype=np.int32)
    while len(rows) > count:
        rows, sizes, places = _merge(rows, sizes, places, min(len(rows) - count, -(-len(rows) // ROUND)))
    return rows, places


def _merge(rows: Floats, sizes: Floats, places: Indices, most: int) -> tuple[Floats, Floats, Indices]:
    """One round: up to `most` rows fewer."""
    given, taking = np.arange(0, len(rows), 2), np.arange(1, len(rows), 2)
    ways = directions(rows)
    alike = ways[given] @ ways[taking].T
    into = taking[alike.argmax(axis=1)]
    leaving = np.argsort(-alike.max(axis=1), kind="stable")[:most]
    sums, weights, firsts = rows * sizes[:, None], sizes.copy(), places.copy()
    np.add.at(sums, into[leaving], sums[given[leaving]])
    np.add.at(weights, into[leaving], sizes[given[leaving]])
    np.minimum.at(firsts, into[leaving], places[given[leaving]])
    stay = np.delete(np.arange(len(rows)), given[leaving])
    stay = stay[np.argsort(firsts[stay])]
    return (sums[stay] / weights[stay, None]).astype(np.float32), weights[stay], firsts[stay]
