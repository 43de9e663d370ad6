"""Mixed bits: each layer's width by what it costs in measured KL divergence, under a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from triptych.compress.bits import allocate
from triptych.compress.loss import Judge
from triptych.compress.model import Model
from triptych.compress.recipe import RecipeStep
from triptych.compress.samples import Sample
from triptych.core.quantized import Held, Quantized

FEW = 8  # samples that widths are chosen on


def widths(
    model: Model, samples: Sequence[Sample], step: RecipeStep, made: Mapping[int, Mapping[str, Held]]
) -> dict[str, Held]:
    """Of each layer its tensors at the width chosen for it. `made`: all tensors by width.

    A layer's cost is the mean divergence with it alone rounded. What its norms became holds at every width.
    """
    assert step.most_bits is not None
    judge = Judge(model, samples[:: max(1, len(samples) // FEW)])
    layers: dict[str, list[str]] = {}
    for name in made[max(made)]:
        layers.setdefault(layer_of(name), []).append(name)
    costs: dict[str, dict[int, float]] = {}
    sizes: dict[str, dict[int, int]] = {}
    budget = 0.0
    for layer, names in layers.items():
        own = {bits: {name: held[name] for name in names} for bits, held in made.items()}
        costs[layer] = {
            bits: float(judge.judge({step.part: tensors}).divergence.mean()) for bits, tensors in own.items()
        }
        sizes[layer] = {bits: sum(_bits(held) for held in tensors.values()) for bits, tensors in own.items()}
        budget += step.most_bits * sum(prod(held.shape) for held in own[max(own)].values())
    chosen = allocate(costs, sizes, int(budget))
    return {name: made[bits][name] for layer, bits in chosen.items() for name in layers[layer]}


def _bits(held: Held) -> int:
    return held.num_bits if isinstance(held, Quantized) else held.nbytes * 8


def layer_of(name: str) -> str:
    """`layers.3` of `layers.3.mlp.up_proj`; the name itself where no component is a number."""
    parts = name.split(".")
    ends = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[0] + 1]) if ends else name
