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


def spoil(engine: TinyEngine) -> None:
    """Have the engine's decoder keep NaN for the first token of its next call, and give NaN wherever it reads that."""

    class Spoilt(type(engine.decoder)):  # type: ignore[misc]
        def __call__(self, arrays):  # type: ignore[no-untyped-def]
            with np.errstate(invalid="ignore"):
                logits = super().__call__(arrays)["logits"]
            firsts = arrays["block_indices"][arrays["block_indices_begins"][:-1]]
            if self.calls == 1:
                self._pages[firsts[0], 0] = np.nan
            is_ill = np.isnan(self._pages[firsts, 0]).any(axis=1)  # by sequence
            rows = np.repeat(is_ill, np.diff(arrays["subsequence_begins"]))
            logits[rows[arrays["sampled"]]] = np.nan
            return {"logits": logits}

    spoilt = Spoilt()
    spoilt.allocate(engine.plan.num_blocks)
    engine.runner._decoder = spoilt
