"""Weights in turn: each is rounded on the inputs that those before it, rounded, leave it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.compress.calibrate import Seen, rows_of
from triptych.compress.gptq import DAMPING, PRIOR_TOKENS, Factored, factored
from triptych.compress.model import Model, fake_quantized
from triptych.compress.samples import Sample
from triptych.core.spec import Modality

Weights = tuple[tuple[Modality, float], ...]
Meet = Callable[[str, "Met"], float | None]  # may give the static step in which the input is rounded from here on


class Met:
    """What one weight meets: of each run the rows, (n, width), and their modalities; None: all are a picture's."""

    def __init__(self, rows: Sequence[Tensor], kinds: Sequence[NDArray[np.uint8] | None]) -> None:
        self._rows = rows
        self._kinds = kinds
        self._grams: dict[Weights, Tensor] = {}
        self._factored: dict[Weights, Factored] = {}

    def gram(self, weights: Mapping[Modality, float]) -> Tensor:
        """Σ weight · x xᵀ, (width, width): a token by its modality's weight (1 where none is named), and tempered."""
        key = tuple(sorted(weights.items()))
        if key not in self._grams:
            of_kind = torch.tensor([weights.get(kind, 1.0) for kind in Modality])
            total = torch.zeros(2 * [self._rows[0].shape[1]])
            for x, kinds in zip(self._rows, self._kinds, strict=True):
                weight = tempered(x)
                if kinds is not None and weights:
                    weight = weight * of_kind[torch.from_numpy(kinds.astype(np.int64)), None]
                total += (x * weight).T @ x
            self._grams[key] = total
        return self._grams[key]

    def factored(self, weights: Mapping[Modality, float]) -> Factored:
        """The gram, damped as befits the tokens seen, and factored once for all who meet it."""
        key = tuple(sorted(weights.items()))
        if key not in self._factored:
            damping = DAMPING * min(1.0, PRIOR_TOKENS / self.seen.num_tokens)
            self._factored[key] = factored(self.gram(weights), damping)
        return self._factored[key]

    @cached_property
    def seen(self) -> Seen:
        """Their range and mean, and a few of them."""
        found = Seen()
        for x in self._rows:
            found.add(Modality.IMAGE, x, has_gram=False)
        return found


def tempered(x: Tensor) -> Tensor:
    """A token's weight, (n, 1). One far longer than the median, as those that attention sinks into, counts by its
    direction alone; else a handful of them would be all that a gram sees."""
    square = x.square().mean(-1, keepdim=True)
    return 1 / (1 + square / square.median().clamp(min=1e-30))


def take_turns(model: Model, samples: Sequence[Sample], part: str, names: Collection[str], meet: Meet) -> None:
    """All samples run through `part` together, and halt before each of `names` for `meet` to put another in its place.

    So each input is computed once, and from rounded weights alone. The part runs no further than the last of `names`.
    """
    weights, left = model.parts[part].weights, set(names)
    with torch.no_grad():
        kinds, runs = [], []
        for sample in samples:
            for run in model.runs(part, sample):
                runs.append(run)
                kinds.append(sample.modality if part == "decoder" else None)
        given: list[Tensor | None] = [None] * len(runs)
        met: Met | None = None
        shared: Tensor | None = None
        while left:
            halts = [run.send(x) for run, x in zip(runs, given, strict=True)]
            name, inputs = halts[0][0], [x for _, x in halts]
            step = None
            if name in left:
                left.remove(name)
                if met is None or inputs[0] is not shared:
                    shared, met = inputs[0], Met([rows_of(x, weights[name]) for x in inputs], kinds)
                step = meet(name, met)
            given = [None if step is None else fake_quantized(x, step) for x in inputs]
