"""Bits under a budget: held against every possible choice."""

import itertools

import numpy as np
import pytest

from triptych.compress.bits import allocate
from triptych.errors import ConfigError

WIDTHS = (3, 4, 5, 8)


def case(seed: int, count: int = 6) -> tuple[dict, dict]:
    """Costs as rounding errors are, each bit leaves about a quarter; weights of different sizes, a scale for 64."""
    rng = np.random.default_rng(seed)
    costs, sizes = {}, {}
    for index in range(count):
        height = 10 ** rng.uniform(-1, 1)
        costs[f"w{index}"] = {bits: float(height * 4.0**-bits * rng.uniform(0.7, 1.4)) for bits in WIDTHS}
        numel = 64 * int(rng.integers(1, 9))
        sizes[f"w{index}"] = {bits: numel * bits + numel // 4 for bits in WIDTHS}
    return costs, sizes


def best(costs: dict, sizes: dict, budget: int) -> float:
    choices = (dict(zip(costs, widths, strict=True)) for widths in itertools.product(WIDTHS, repeat=len(costs)))
    fits = (choice for choice in choices if sum(sizes[name][b] for name, b in choice.items()) <= budget)
    return min(sum(costs[name][b] for name, b in choice.items()) for choice in fits)


def total(values: dict, chosen: dict) -> float:
    return sum(values[name][bits] for name, bits in chosen.items())


def test_it_comes_close_to_the_best_of_all_choices_and_never_over_the_budget():
    excess = []
    for seed, share in itertools.product(range(6), (0.25, 0.5, 0.75)):
        costs, sizes = case(seed)
        least, most = (sum(end(size.values()) for size in sizes.values()) for end in (min, max))
        budget = int(least + share * (most - least))

        chosen = allocate(costs, sizes, budget)

        assert total(sizes, chosen) <= budget
        lowest = best(costs, sizes, budget)
        biggest = max(cost[3] - cost[4] for cost in costs.values())
        assert lowest <= total(costs, chosen) <= lowest + biggest
        excess.append(total(costs, chosen) / lowest - 1)
    assert np.median(excess) < 0.1


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_best_of_all_choices_that_take_what_it_takes(seed):
    """Down its chain of steps, before any is skipped for want of room."""
    costs, sizes = case(seed)
    steps = {name: allocate({name: costs[name]}, {name: sizes[name]}, 1 << 30)[name] for name in costs}
    assert allocate(costs, sizes, total(sizes, steps)) == steps

    half = allocate(costs, sizes, total(sizes, steps) * 3 // 4)

    assert total(costs, half) <= 1.2 * best(costs, sizes, total(sizes, half)) + 1e-12


def test_a_width_that_costs_more_than_a_mix_of_others_is_passed_over():
    costs = {"w": {3: 10.0, 4: 9.9, 8: 0.0}}

    chosen = allocate(costs, {"w": {3: 3, 4: 4, 8: 8}}, 8)

    assert chosen == {"w": 8}


def test_more_bits_that_do_not_help_are_not_spent():
    assert allocate({"w": {4: 0.0, 8: 0.0}}, {"w": {4: 4, 8: 8}}, 100) == {"w": 4}


def test_a_budget_under_the_smallest_widths_is_refused_with_numbers():
    with pytest.raises(ConfigError, match="the smallest widths take 64 bytes, the budget is 50"):
        allocate({"w": {4: 1.0}}, {"w": {4: 512}}, 400)
