"""How much the loss feels each modality, layer by layer: MBQ's weights (arXiv:2412.19509)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.backends.torch_graph import Hooks
from triptych.compress.samples import Sample
from triptych.core.spec import Modality

BLOCK_ENDS = ("o_proj", "down_proj")  # whose products a layer adds to what it was given
Logits = Callable[[Sample, NDArray[np.int64], Hooks], Tensor]  # of the positions asked for, (R, vocab)
Felt = dict[str, dict[Modality, float]]  # of each block's end, mean |gradient| of its output by modality


@dataclass(slots=True)
class _Tap:
    """Keeps the outputs of one pass whose gradients are wanted."""

    outputs: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, value: Any) -> Any:
        if name.endswith(BLOCK_ENDS):
            if not value.requires_grad:
                value = value.detach().requires_grad_(True)
            value.retain_grad()
            self.outputs[name] = value
        return value


def sensitivities(logits: Logits, samples: Iterable[Sample]) -> Felt:
    """Mean |gradient| of the answers' cross-entropy, one backward pass a sample, over all tokens of each modality.

    A layer that goes on with the judged rows alone, as the last one's MLP, counts those.
    """
    sums: dict[str, dict[Modality, list[float]]] = {}
    for sample in samples:
        judged = sample.judged
        if not len(judged):
            continue
        tap = _Tap()
        with torch.enable_grad():
            targets = torch.from_numpy(sample.token_ids[judged + 1].astype(np.int64))
            torch.nn.functional.cross_entropy(logits(sample, judged, Hooks(on_output=tap)), targets).backward()
        for name, value in tap.outputs.items():
            found = value.grad
            assert found is not None
            energy = found.reshape(-1, found.shape[-1]).abs().mean(1).numpy()
            kinds = sample.modality if len(energy) == sample.num_tokens else sample.modality[judged]
            for modality in np.unique(kinds):
                own = sums.setdefault(name, {}).setdefault(Modality(int(modality)), [0.0, 0.0])
                own[0] += float(energy[kinds == modality].sum())
                own[1] += float((kinds == modality).sum())
    return {name: {each: total / count for each, (total, count) in own.items()} for name, own in sums.items()}


def token_weights(felt: Mapping[str, Mapping[Modality, float]]) -> dict[str, dict[Modality, float]]:
    """Of each block's end, how much a token of each modality weighs beside one of text.

    As in MBQ: the ratio to text, at least its median over the blocks of that kind, so that no layer forgets a modality.
    """
    ratios: dict[tuple[str, Modality], dict[str, float]] = {}
    for name, own in felt.items():
        text = own.get(Modality.TEXT, 0.0)
        for modality, value in own.items():
            if text > 0 and modality is not Modality.TEXT:
                ratios.setdefault((name.rpartition(".")[2], modality), {})[name] = value / text
    weights: dict[str, dict[Modality, float]] = {name: {Modality.TEXT: 1.0} for name in felt}
    for (kind, modality), found in ratios.items():
        floor = median(found.values())
        for name in felt:
            if name.rpartition(".")[2] == kind:
                weights[name][modality] = max(found.get(name, floor), floor)
    return weights


def block_end(name: str) -> str:
    """Whose weights hold for the linear `name`: that of its attention or MLP."""
    block = name.rpartition(".")[0]
    return f"{block}.{'o_proj' if block.endswith('attn') else 'down_proj'}"
