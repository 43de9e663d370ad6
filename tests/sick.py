"""A decoder that falls ill."""

from __future__ import annotations

import numpy as np

from triptych.testing import TinyEngine


def sicken(engine: TinyEngine, *, after: int) -> None:
    """Have the engine's decoder give NaN wherever it has just read this token."""
    decoder = engine.decoder

    class Sick(type(decoder)):  # type: ignore[misc]
        def __call__(self, arrays):  # type: ignore[no-untyped-def]
            logits = super().__call__(arrays)["logits"]
            logits[arrays["embeddings"][arrays["sampled"], 0] == after] = np.nan
            return {"logits": logits}

    sick = Sick()
    sick.allocate(engine.plan.num_blocks)
    engine.runner._decoder = sick
