"""What rounding each weight will cost, felt before any is rounded: the divergence's second-order part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triptych.backends.torch_graph import Hooks
from triptych.compress.model import Model
from triptych.compress.rounding import Grid, fake_quantized
from triptych.compress.samples import Sample
from triptych.compress.turn import tempered

FEW = 32  # samples that are felt
LOST_BYTES = 1 << 30  # of what rounding takes from weights, kept from one sample to the next
MOST_ROWS = 2048  # of a block of a weight's outputs, whose curvature is kept together: its square is in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingCost:
    """costs: of each weight, nats a judged token when it alone is rounded. units: weights that share an input, which
    other programs multiply with as one and want in one width. outputs: Σ g gᵀ of its product's gradients, tempered,
    in blocks of MOST_ROWS at most (`gptq.blocks`)."""

    costs: Mapping[str, float]
    units: tuple[tuple[str, ...], ...]
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


def feel(
    model: Model, samples: Sequence[Sample], grids: Mapping[str, Grid], *, with_outputs: bool = False
) -> RoundingCost:
    """Of the decoder's weights, each on its grid to nearest: ½ Σ ((ΔW x) · gradient)² over all tokens.

    The gradient is of the cross-entropy of tokens drawn from what the model itself predicts, whose squares are Fisher's
    information, which is the divergence's curvature. One backward pass a sample, of a few.
    """
    draw = torch.Generator().manual_seed(0)
    felt, num_tokens = _Feeling(model.parts["decoder"].weights, grids, with_outputs), 0
    for sample in few(samples):
        with torch.no_grad():
            embeddings = model.embed(sample)
        with torch.enable_grad():
            logits = model.decode(embeddings.requires_grad_(), sample.judged, {"decoder": felt.hooks()})
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw)[:, 0]
            functional.cross_entropy(logits, drawn, reduction="sum").backward()
        num_tokens += len(sample.judged)
    leaders = dict.fromkeys(felt.leaders.values())
    return RoundingCost(
        costs={name: felt.sums[name] / num_tokens for name in grids},
        units=tuple(tuple(name for name in grids if felt.leaders[name] == leader) for leader in leaders),
        outputs=felt.outputs,
    )


def few(samples: Sequence[Sample]) -> list[Sample]:
    """Those that judge a token, or FEW of them: evenly spaced among those with media, and among the others."""
    judged = sorted((sample for sample in samples if len(sample.judged)), key=lambda sample: sample.has_media)
    count = min(FEW, len(judged))
    return [judged[place * len(judged) // count] for place in range(count)]


class _Feeling:
    """Looks at each weight's input on the way forward, and at its product's gradient on the way back."""

    def __init__(self, weights: Mapping[str, Tensor], grids: Mapping[str, Grid], with_outputs: bool) -> None:
        self.sums = dict.fromkeys(grids, 0.0)
        self.outputs: dict[str, Tensor] = {}
        self.leaders: dict[str, str] = {}  # whose input a weight shares
        self._weights = weights
        self._grids = grids
        self._with_outputs = with_outputs
        self._inputs: dict[str, Tensor] = {}
        self._lost: dict[str, Tensor] = {}

    def hooks(self) -> Hooks:
        """For the next sample."""
        self._inputs = {}
        return Hooks(on_input=self._look, on_output=self._await)

    def _look(self, name: str, x: Any) -> Any:
        if name in self._grids:
            self.leaders[name] = next((other for other, seen in self._inputs.items() if seen is x), name)
            self._inputs[name] = x
        return x

    def _await(self, name: str, product: Any) -> Any:
        if name in self._grids:
            product.register_hook(partial(self._add, name))
        return product

    def _add(self, name: str, gradient: Tensor) -> None:
        weight = self._weights[name]
        felt = ((self._inputs[name].detach() @ self._taken(name).T) * gradient).sum(-1)
        self.sums[name] += float(felt.square().sum()) / 2
        if self._with_outputs:
            self.outputs[name] = self.outputs.get(name, 0) + _in_blocks(gradient.reshape(-1, len(weight)))

    def _taken(self, name: str) -> Tensor:
        """What rounding takes from a weight."""
        if name in self._lost:
            return self._lost[name]
        lost = fake_quantized(self._weights[name], self._grids[name], clip=False) - self._weights[name]
        if lost.nbytes + sum(kept.nbytes for kept in self._lost.values()) <= LOST_BYTES:
            self._lost[name] = lost
        return lost


def _in_blocks(gradients: Tensor) -> Tensor:
    """Σ g gᵀ of (n, rows), tempered, as `gptq.blocks` takes it apart: blocks as even as they can be."""
    rows = gradients.shape[1]
    size = -(-rows // -(-rows // MOST_ROWS))
    parts = zip((gradients * tempered(gradients)).split(size, 1), gradients.split(size, 1), strict=True)
    return torch.cat([functional.pad(heavy.T @ own, (0, size - own.shape[1])) for heavy, own in parts])
