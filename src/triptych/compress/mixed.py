"""Mixed bits: each layer's width by its measured KL divergence, under a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from msgspec.structs import replace

from triptych.compress.bits import allocate
from triptych.compress.loss import Judge
from triptych.compress.model import Model
from triptych.compress.recipe import Recipe, RecipeStep, Resolved, resolve
from triptych.compress.samples import Sample
from triptych.core.quantized import Held, num_bits
from triptych.errors import ConfigError

FEW = 8  # samples that widths are chosen on
WIDTHS = (4, 8)  # what every runtime multiplies with
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]


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
        sizes[layer] = {bits: sum(num_bits(held) for held in tensors.values()) for bits, tensors in own.items()}
        budget += step.most_bits * sum(prod(held.shape) for held in own[max(own)].values())
    chosen = allocate(costs, sizes, int(budget))
    return {name: made[bits][name] for layer, bits in chosen.items() for name in layers[layer]}


def layer_of(name: str) -> str:
    """`layers.3` of `layers.3.mlp.up_proj`; the name itself where no component is a number."""
    parts = name.split(".")
    ends = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[0] + 1]) if ends else name


def within(recipe: Recipe, shapes: Shapes, budget_bytes: int) -> Recipe:
    """The recipe with its decoder's rounded steps, or those that have widths already, fitted to a budget of bytes.

    Norms and biases are not in it. Raises ConfigError where nothing can give way, or the rest takes more than all.
    """
    found = resolve(recipe, {part: weights_of(own) for part, own in shapes.items()})
    mixed = [each for each in found if each.step.widths] or [
        each for each in found if each.step.part == "decoder" and each.step.bits is not None
    ]
    if not mixed:
        raise ConfigError(
            f"recipe {recipe.name} rounds nothing in the decoder that a budget could change",
            hint="--budget-bytes goes with `w4` or `w8`, or with a recipe that has `widths`",
        )
    rest = [each for each in found if each not in mixed]
    fixed = sum(_step_bits(each, shapes[each.step.part]) for each in rest)
    count = sum(prod(shapes[each.step.part][f"{name}.weight"]) for each in mixed for name in each.names)
    most = (8 * budget_bytes - fixed) / count
    if most <= 0:
        raise ConfigError(f"the budget is {budget_bytes:,} bytes, {fixed // 8:,} go to what is not mixed")
    steps = {
        each.step: replace(each.step, bits=None, widths=each.step.widths or WIDTHS, most_bits=most) for each in mixed
    }
    return replace(recipe, steps=tuple(steps.get(step, step) for step in recipe.steps))


def _step_bits(found: Resolved, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of storage of a step's weights, at its one width or as they are kept."""
    total = 0
    for name in found.names:
        shape = shapes[f"{name}.weight"]
        rows, width = shape[0], prod(shape[1:])
        wide = 32 if found.step.keep == "fp32" else 16
        bits = found.step.bits
        total += rows * width * wide if bits is None else found.grids[name][bits].num_bits(rows, width)
    return total


def weights_of(own: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.removesuffix(".weight"): shape for name, shape in own.items() if name.endswith(".weight")}
