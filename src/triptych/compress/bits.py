"""How many bits each weight gets when all together may take so many bytes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from triptych.errors import ConfigError

Costs = Mapping[str, Mapping[int, float]]  # of each weight, its width in bits → what the loss rises by, measured
Sizes = Mapping[str, Mapping[int, int]]  # likewise → bits of storage, scales included


def allocate(costs: Costs, sizes: Sizes, budget_bits: int) -> dict[str, int]:
    """Widths of least summed cost whose storage fits `budget_bits`.

    Greedy on each weight's lower convex hull: from the smallest on, always the step that lowers the loss most for each
    bit it takes, skipping what no longer fits. Optimal where steps fit the budget exactly; elsewhere it errs by less
    than its last step. Costs add up only as far as weights do not make up for one another: measure the whole after.
    Raises ConfigError when even the smallest do not fit.
    """
    chains = {name: _hull(costs[name], sizes[name]) for name in costs}
    place = dict.fromkeys(chains, 0)
    used = sum(sizes[name][chain[0]] for name, chain in chains.items())
    if used > budget_bits:
        raise ConfigError(
            f"the smallest widths take {used / 8:,.0f} bytes, the budget is {budget_bits / 8:,.0f}",
            hint="allow fewer bits a weight, larger groups, or more bytes",
        )
    steps = [entry for name in chains if (entry := _step(name, chains[name], 0, costs, sizes)) is not None]
    heapq.heapify(steps)
    while steps:
        _, name, more = heapq.heappop(steps)
        if used + more > budget_bits:
            continue  # nor would any later step of this weight
        used += more
        place[name] += 1
        if (entry := _step(name, chains[name], place[name], costs, sizes)) is not None:
            heapq.heappush(steps, entry)
    return {name: chain[place[name]] for name, chain in chains.items()}


def _step(name: str, chain: list[int], at: int, costs: Costs, sizes: Sizes) -> tuple[float, str, int] | None:
    if at + 1 == len(chain):
        return None
    here, there = chain[at], chain[at + 1]
    more = sizes[name][there] - sizes[name][here]
    return ((costs[name][there] - costs[name][here]) / more, name, more)


def _hull(costs: Mapping[int, float], sizes: Mapping[int, int]) -> list[int]:
    """Widths by storage, without those that cost more than a mix of their neighbours, so that gains only shrink."""
    chain: list[int] = []
    for bits in sorted(costs, key=lambda bits: (sizes[bits], costs[bits])):
        if chain and costs[bits] >= costs[chain[-1]]:
            continue
        while len(chain) > 1 and _gain(chain[-2], chain[-1], costs, sizes) <= _gain(chain[-1], bits, costs, sizes):
            chain.pop()
        chain.append(bits)
    return chain


def _gain(low: int, high: int, costs: Mapping[int, float], sizes: Mapping[int, int]) -> float:
    return (costs[low] - costs[high]) / (sizes[high] - sizes[low])
