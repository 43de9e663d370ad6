"""Cross-modal top-k masks for training: hard where they are used, differentiable where they learn.

They save no time with dense kernels (docs/journal.md): dropping tokens does. They are a measure, and a way to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from triptych.core.spec import Modality
from triptych.errors import ConfigError

Kind = Literal["straight_through", "continuous"]
BISECTIONS = 40


def _defaults() -> dict[Modality, int]:
    return {Modality.TEXT: 12, Modality.IMAGE: 24, Modality.AUDIO: 24, Modality.VIDEO: 24}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskConfig:
    """How many keys of the other modalities a query keeps, by the query's own modality, and how that is trained.

    reference: None: always k. Else k is what a query keeps whose effective number of attended foreign keys, exp(H),
    is `reference`; one that looks at twice as many keeps twice as many.
    tau: the temperature, from the first step to the last; it is lowered geometrically (`CrossModalMask.anneal`).
    """

    kind: Kind = "straight_through"
    k: Mapping[Modality, int] = field(default_factory=_defaults)
    reference: float | None = None
    tau: tuple[float, float] = (1.0, 0.1)

    def __post_init__(self) -> None:
        if min(self.k.values()) < 1 or min(self.tau) <= 0 or (self.reference or 1.0) <= 0:
            raise ConfigError(
                f"a mask with k {dict(self.k)}, tau {self.tau} and reference {self.reference}",
                hint="k is at least 1, tau and reference are above 0",
            )


class CrossModalMask(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Attention in which each query sees only the best k of other modalities' keys; its own are left alone.

    In training the masks are those of `config.kind`; after `eval()` they are hard.
    """

    def __init__(self, config: MaskConfig) -> None:
        super().__init__()
        self.config = config
        self.tau = config.tau[0]

    def anneal(self, share: float) -> None:
        """Lower the temperature to that of `share` of the training, 0 to 1."""
        first, last = self.config.tau
        self.tau = first * (last / first) ** share

    def forward(
        self, logits: Tensor, queries: Tensor, keys: Tensor, allowed: Tensor, scores: Tensor | None = None
    ) -> Tensor:
        """Attention weights (…, rows, keys) whose rows sum to 1 after the masking.

        logits: (…, rows, keys) before the softmax; queries (rows,) and keys (keys,): a Modality each; allowed
        (rows, keys): where a query may look at all, at least at one key of its own modality. scores: what the keys
        are chosen by, shaped as `logits`, which are taken if None.
        """
        chosen_by = logits if scores is None else scores
        foreign = (queries[:, None] != keys[None, :]) & allowed
        k = self._k(logits, queries, foreign)
        choose: Callable[[Tensor, Tensor, Tensor, float], Tensor] = hard_top_k
        if self.training:
            choose = straight_through if self.config.kind == "straight_through" else soft_top_k
        weights = torch.where(foreign, choose(chosen_by, k, foreign, self.tau), allowed.to(logits.dtype))
        return renormalised(logits, weights)

    def _k(self, logits: Tensor, queries: Tensor, foreign: Tensor) -> Tensor:
        """(…, rows, 1): how many foreign keys each query keeps."""
        k = torch.tensor([self.config.k[Modality(int(one))] for one in queries], device=logits.device)[:, None]
        if self.config.reference is None:
            return k.expand(*logits.shape[:-1], 1)
        wanted = torch.round(k * effective_number(logits.detach(), foreign) / self.config.reference)
        return torch.minimum(wanted, foreign.sum(-1, keepdim=True)).clamp_min(1)


def effective_number(logits: Tensor, among: Tensor) -> Tensor:
    """exp(H) of the softmax over the keys `among`, (…, rows, 1): as if so many were attended to alike. 1 for none."""
    held = logits.masked_fill(~among, -math.inf)
    shares = torch.softmax(held.masked_fill(~among.any(-1, keepdim=True), 0.0), -1)
    entropy = -torch.where(among, torch.xlogy(shares, shares), 0.0).sum(-1, keepdim=True)
    return entropy.exp()


def renormalised(logits: Tensor, weights: Tensor) -> Tensor:
    """exp(logits) · weights with rows that sum to 1; safe where the largest logits have no weight."""
    shift = (logits + weights.clamp_min(1e-30).log()).amax(-1, keepdim=True).detach()
    held = (logits - shift).clamp(max=60.0).exp() * weights
    return held / held.sum(-1, keepdim=True)


def hard_top_k(scores: Tensor, k: Tensor, among: Tensor, tau: float = 0.0) -> Tensor:
    """1 for the k best of the keys `among`, else 0; of equals the earlier ones. k (…, rows, 1)."""
    held = scores.detach().masked_fill(~among, -math.inf)
    place = (k.long() - 1).clamp(0, held.shape[-1] - 1)
    last = held.sort(dim=-1, descending=True).values.gather(-1, place.expand(*held.shape[:-1], 1))
    better, equal = held > last, (held == last) & among
    room = k - better.sum(-1, keepdim=True)
    return (better | (equal & (equal.cumsum(-1) <= room))).to(scores.dtype)


def straight_through(scores: Tensor, k: Tensor, among: Tensor, tau: float) -> Tensor:
    """`hard_top_k` whose gradient is that of sigmoid((z − z_(k)) / tau), z_(k) the k-th best (arXiv:1308.3432).

    Where there are no more than k keys there is nothing to choose, and no gradient.
    """
    hard = hard_top_k(scores, k, among)
    last = torch.where(hard > 0, scores, math.inf).amin(-1, keepdim=True)
    last = torch.where(last.isinf(), 0.0, last)
    soft = torch.sigmoid((torch.where(among, scores, 0.0) - last) / tau)
    return torch.where(among & _is_choice(k, among), hard + soft - soft.detach(), hard)


def soft_top_k(scores: Tensor, k: Tensor, among: Tensor, tau: float) -> Tensor:
    """Weights sigmoid((z − t) / tau) with t such that they sum to k: the continuous path, as DiffPrune argues for it.

    t is found by bisection and given its exact gradient by one Newton step. No more than k keys: all weigh 1.
    """
    inside = torch.where(among, scores, 0.0)
    reach = tau * (math.log(scores.shape[-1]) + 4.0)
    low = torch.where(among, scores, math.inf).amin(-1, keepdim=True).detach() - reach
    high = torch.where(among, scores, -math.inf).amax(-1, keepdim=True).detach() + reach
    low, high = (torch.where(end.isfinite(), end, 0.0) for end in (low, high))

    def weights(threshold: Tensor) -> Tensor:
        return torch.where(among, torch.sigmoid((inside - threshold) / tau), 0.0)

    with torch.no_grad():
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            is_low = weights(middle).sum(-1, keepdim=True) > k
            low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
        threshold = (low + high) / 2
        found = weights(threshold)
        slope = (found * (1 - found)).sum(-1, keepdim=True).clamp_min(1e-12) / tau
    threshold = threshold + (weights(threshold).sum(-1, keepdim=True) - k) / slope
    return torch.where(_is_choice(k, among), weights(threshold), among.to(scores.dtype))


def _is_choice(k: Tensor, among: Tensor) -> Tensor:
    return among.sum(-1, keepdim=True) > k
