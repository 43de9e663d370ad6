"""AWQ and MBQ: scale up the channels that matter before rounding, tokens weighed by modality.

AWQ (arXiv:2306.00978) takes every token for equal. MBQ (arXiv:2412.19509) weighs the error of each modality's tokens by
how much the loss feels it. Any modality may take part: weights of 1 are AWQ bit for bit, a weight of 0 is calibration
without that modality. Ours minimises the squared error, where MBQ's default is the absolute one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych.compress.rounding import Grid, fake_quantized
from triptych.core.spec import Modality
from triptych.errors import CheckpointError

EXPONENTS = tuple(step / 20 for step in range(20))  # 0 first: no scaling, unless another is better
LEAST = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """What calibration saw of one input: gram Σ x xᵀ (width, width), total Σ |x| (width,), over num_tokens."""

    gram: Tensor
    total: Tensor
    num_tokens: float

    @classmethod
    def of(cls, x: Tensor) -> Channels:
        """Of tokens (n, width)."""
        return cls(gram=x.T @ x, total=x.abs().sum(0), num_tokens=float(len(x)))

    @property
    def mean(self) -> Tensor:
        return self.total / self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """scales: (width,), divided out of the input and multiplied into the weights. error, plain: with and without."""

    scales: Tensor
    exponent: float
    error: float
    plain: float


def balanced(seen: Mapping[Modality, Channels], weights: Mapping[Modality, float] | None = None) -> Channels:
    """All modalities together, each token counted with its modality's weight (1 where none is named).

    Raises CheckpointError when nothing is left.
    """
    grams, totals, counts = [], [], []
    for modality in sorted(seen):
        own, weight = seen[modality], (weights or {}).get(modality, 1.0)
        if weight > 0 and own.num_tokens > 0:
            grams.append(own.gram * weight)
            totals.append(own.total * weight)
            counts.append(own.num_tokens * weight)
    if not grams:
        raise CheckpointError("no token has any weight", hint="calibrate on samples of the modalities that are weighed")
    return Channels(gram=_sum(grams), total=_sum(totals), num_tokens=sum(counts))


def search(weights: Sequence[Tensor], seen: Channels, grid: Grid) -> Found:
    """The scales s for linears (rows, width) that share an input, of least Σ |x (W - Q(W s) / s)ᵀ|².

    s = mean|x|^r, normed so that its extremes lie evenly about 1; r over 20 points of [0, 1).
    """
    best: Found | None = None
    plain = torch.inf
    for exponent in EXPONENTS:
        scales = _scales(seen.mean, exponent)
        lost = sum(_error(weight, scales, seen.gram, grid) for weight in weights)
        plain = lost if exponent == 0 else plain
        if best is None or lost < best.error:
            best = Found(scales=scales, exponent=exponent, error=lost, plain=plain)
    assert best is not None
    return replace(best, plain=plain)


def _scales(mean: Tensor, exponent: float) -> Tensor:
    scales = mean.float().clamp(min=LEAST).pow(exponent)
    return (scales / (scales.max() * scales.min()).sqrt()).clamp(min=LEAST)


def _error(weight: Tensor, scales: Tensor, gram: Tensor, grid: Grid) -> float:
    """Over the whole range, as the paper has it: ranges are clipped once the scales are found."""
    lost = fake_quantized(weight * scales, grid, clip=False) / scales - weight
    return float(((lost @ gram) * lost).sum())


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
