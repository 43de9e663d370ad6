"""Mixed bits: each weight's width by what its rounding is felt to cost, under a budget."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from msgspec.structs import replace

from triptych.compress.bits import allocate
from triptych.compress.cost import RoundingCost
from triptych.compress.recipe import Recipe, RecipeStep, Resolved, resolve
from triptych.compress.rounding import fitted
from triptych.errors import ConfigError

WIDTHS = (4, 8)  # what every runtime multiplies with
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]


def widths(felt: RoundingCost, shapes: Mapping[str, tuple[int, ...]], found: Resolved) -> dict[str, int]:
    """Of each weight its width in bits, so that least is felt and all take `most_bits` on average; one for a unit.

    Costs are those of the least width; an error's square shrinks with that of its steps, of which b bits have 2^b - 1.
    """
    assert found.step.most_bits is not None
    least = min(found.step.widths)
    costs: dict[str, dict[int, float]] = {}
    sizes: dict[str, dict[int, int]] = {}
    for names in felt.units:
        cost = sum(felt.costs[name] for name in names)
        costs[names[0]] = {bits: cost * ((2**least - 1) / (2**bits - 1)) ** 2 for bits in found.step.widths}
        sizes[names[0]] = {
            bits: sum(found.grids[name][bits].num_bits(shapes[name][0], prod(shapes[name][1:])) for name in names)
            for bits in found.step.widths
        }
    budget = found.step.most_bits * sum(prod(shapes[name]) for names in felt.units for name in names)
    if found.fallbacks:  # smaller groups than were asked for may take more by themselves; it is told that they do
        budget = max(budget, sum(size[least] for size in sizes.values()))
    chosen = allocate(costs, sizes, int(budget))
    return {name: chosen[names[0]] for names in felt.units for name in names}


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
    least = sum(_least_bits(steps[each.step], name, shapes) for each in mixed for name in each.names)
    if least > most * count:
        raise ConfigError(
            f"the budget is {budget_bytes:,} bytes, the smallest widths take {int(least + fixed) // 8:,}",
            hint="allow larger groups, or more bytes",
        )
    return replace(recipe, steps=tuple(steps.get(step, step) for step in recipe.steps))


def _least_bits(step: RecipeStep, name: str, shapes: Shapes) -> int:
    rows, *rest = shapes[step.part][f"{name}.weight"]
    return fitted(step.grid(min(step.widths)), name, prod(rest))[0].num_bits(rows, prod(rest))


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
