"""Arrays, logits and weights to the named figures that gates ask about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triptych.backends.base import Array
from triptych.compile.verify import metrics
from triptych.compile.verify.weights import WeightFigures


def of_weights(found: Sequence[WeightFigures]) -> tuple[dict[str, float], str]:
    """The worst of all weights, and the name of the worst."""
    figures = {
        "worst weight sqnr_db": min(weight.sqnr_db for weight in found),
        "worst group sqnr_db": min(weight.group_sqnr_db for weight in found),
        "worst group gain": max(weight.gain for weight in found),
    }
    worst = max(found, key=lambda weight: (weight.gain, -weight.group_sqnr_db))
    return figures, worst.name


def of_arrays(twin: Array, tested: Array) -> dict[str, float]:
    """Two arrays of rows."""
    found = metrics.likeness(twin, tested)
    return {"cosine": found.cosine, "worst row cosine": found.worst_cosine, "sqnr_db": found.sqnr_db}


def of_logits(twin: Sequence[Array], tested: Sequence[Array]) -> dict[str, float]:
    """Next-token distributions of every prompt, (R, vocab) each, and the logits as rows.

    `kl_share` is the mean divergence as a share of `metrics.information`: of all that the twin's distributions say.
    """
    kl = np.concatenate([metrics.kl_divergence(a, b) for a, b in zip(twin, tested, strict=True)])
    top = np.concatenate([metrics.same_top(a, b) for a, b in zip(twin, tested, strict=True)])
    known = metrics.information(np.concatenate(list(twin)))
    return {
        "kl_mean_nats": float(kl.mean()),
        "kl_p99_nats": float(np.percentile(kl, 99)),
        "kl_share": float(kl.mean() / known) if known > 0 else float("nan"),
        "same_top_share": float(top.mean()),
        "positions": float(len(kl)),
    } | of_arrays(np.concatenate(list(twin)), np.concatenate(list(tested)))
