"""How many tokens each layer keeps, and which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.policy import KVPolicy
from triptych.core.spec import Modality

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a choice depends on besides scores. modality: (num_tokens,) of every token computed so far."""

    policy: KVPolicy
    modality: NDArray[np.uint8]
    num_protected: int

    @property
    def num_tokens(self) -> int:
        return len(self.modality)

    def is_forced(self, tokens: Array) -> Array:
        """Sinks, the system message and the last `window` tokens stay whatever their score."""
        first = max(self.policy.sinks, self.num_protected)
        forced: Array = (tokens < first) | (tokens >= self.num_tokens - self.policy.window)
        return forced

    def floors(self) -> dict[int, int]:
        """Tokens that stay at least, by modality."""
        shares = {int(Modality[name.upper()]): share for name, share in self.policy.floors.items()}
        return {kind: -int(-share * (self.modality == kind).sum() // 1) for kind, share in shares.items()}


def budgets(policy: KVPolicy, num_tokens: int, num_layers: int) -> NDArray[np.int64]:
    """Tokens for each layer, (layers,), in the mean `policy.budget` of all, none above `num_tokens`.

    `policy.adaptive` of them follow the layers' density, in layers that look widely at the cost of those that do not
    (VL-Cache, arXiv:2410.23317); more than a fifth starves later layers (EffiVLM-Bench).
    """
    density = np.array(policy.layer_density or [1.0] * num_layers)
    shares = (1 - policy.adaptive) / num_layers + policy.adaptive * density / density.sum()
    total = policy.budget * num_tokens * num_layers
    wanted = total * shares
    while (wanted > num_tokens + 1e-6).any():  # what a full layer cannot take goes to the others
        full = wanted >= num_tokens
        left = (total - full.sum() * num_tokens) / shares[~full].sum()
        wanted = np.where(full, num_tokens, left * shares)
    found: NDArray[np.int64] = np.minimum(np.ceil(wanted - 1e-6), num_tokens).astype(np.int64)
    return found


def counts(context: Context, num_layers: int) -> NDArray[np.int64]:
    """How many tokens each layer keeps, (layers,): its budget, or what is forced and floors if that is more."""
    forced = context.is_forced(np.arange(context.num_tokens))
    least = int(forced.sum())
    for kind, floor in context.floors().items():
        least += max(0, floor - int((forced & (context.modality == kind)).sum()))
    return np.maximum(budgets(context.policy, context.num_tokens, num_layers), min(least, context.num_tokens))


def choose(scores: Array, tokens: Array, context: Context, count: int) -> NDArray[np.int64]:
    """Rows that stay, ascending: what is forced, then each floor's best, then the best of all.

    scores, tokens: (num_rows,), a row's importance and which token it is. Of equals the earlier stays.
    """
    forced = context.is_forced(tokens)
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    stays = forced.copy()
    for kind, floor in context.floors().items():
        own = context.modality[tokens] == kind
        best = order[(own & ~stays)[order]]
        stays[best[: max(0, floor - int((stays & own).sum()))]] = True
    rest = order[~stays[order]]
    stays[rest[: max(0, count - int(stays.sum()))]] = True
    return np.flatnonzero(stays)
