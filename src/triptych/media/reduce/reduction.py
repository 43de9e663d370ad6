"""One item's rows reduced, run by run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from triptych.core.policy import Method as Name
from triptych.core.request import Patches
from triptych.media.reduce import baselines, diversity
from triptych.media.reduce.run import Floats, Indices, Method, Run, keeping
from triptych.media.reduce.tome import tome

BY_NAME: Mapping[Name, Method] = {
    "cenprune": keeping(diversity.cenprune),
    "cdpruner": keeping(diversity.cdpruner),
    "tome": tome,
    "pool": baselines.pool,
    "grid": keeping(baselines.grid),
    "random": keeping(baselines.random),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What stands in the prompt for an item.

    rows: (k, d). kept: (k,), for each the row of the whole item whose position it takes; ascending and distinct.
    """

    rows: Floats
    kept: Indices


def reduce(item: Patches, rows: Floats, question: Floats) -> Reduced:
    """Reduce all rows of an item, (len(item.take), d) and finite; a run whose count is its length stays as it is.

    question: (q, d), the embeddings of `item.question`.
    """
    method, reduction = BY_NAME[item.reduction.method], item.reduction
    seed = int.from_bytes(item.digest.encode()[:16], "little")
    parts, places, first = [], [], 0
    for at, length in enumerate(item.runs or (len(item.take),)):
        own, count = rows[first : first + length], reduction.count(length)
        kept = np.arange(length, dtype=np.int32)
        if count < length:
            own, kept = method(Run(rows=own, question=question, seed=seed + at), count)
        parts.append(own)
        places.append(kept + np.int32(first))
        first += length
    assert first == len(rows), f"runs of {first} rows for {len(rows)}"
    return Reduced(rows=np.concatenate(parts), kept=np.concatenate(places))
