"""Scales between channels, folded into what comes before: no tensor is added, no product changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FOLDS = (  # what makes an input, and all that reads it, by their names in one layer
    ("input_layernorm", QKV),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("layer_norm1", QKV),
    ("layer_norm2", ("mlp.fc1",)),
    ("self_attn.v_proj", ("self_attn.out_proj",)),
)
LEAST = 1e-8

Factors = Mapping[str, Sequence[Tensor]]  # of each tensor, what multiplied it in turn: (rows, 1) or (width,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A norm, or a linear without an activation after it, and the weights that read what it makes."""

    maker: str
    readers: tuple[str, ...]


def folds(names: Collection[str], tensors: Mapping[str, Tensor]) -> list[Fold]:
    """All pairs of a layer whose readers are all among `names`; a linear that makes an input must be too.

    Grouped key/value heads are read by several query heads each: no scale of theirs can be one channel's.
    """
    found = []
    for maker, readers in FOLDS:
        for first in (name for name in tensors if _ends(name, maker)):
            start = first.removesuffix(maker)
            whole = tuple(start + reader for reader in readers)
            fits = all(name in names for name in whole) and (tensors[first].ndim == 1 or first in names)
            if fits and len(tensors[first]) == tensors[whole[0]].shape[1]:
                found.append(Fold(maker=first, readers=whole))
    return found


def fold(tensors: dict[str, Tensor], pair: Fold, scales: Tensor, kind: torch.dtype) -> dict[str, Tensor]:
    """Divide the maker by `scales` (width,) and multiply its readers, in `tensors`.

    A norm keeps a type `kind`, and what that rounds away goes into the readers. Gives what each tensor was multiplied
    by: the maker and its bias, and the readers.
    """
    maker, bias = tensors[pair.maker], f"{pair.maker}.bias"
    if maker.ndim == 1:
        held = (maker / scales).to(kind).float()
        scales = torch.where(held.abs() > LEAST, maker / held, torch.ones_like(scales))
        tensors[pair.maker] = torch.where(held.abs() > LEAST, held, maker)
        factors = {pair.maker: 1 / scales}
    else:
        tensors[pair.maker] = maker / scales[:, None]
        factors = {pair.maker: 1 / scales[:, None]}
    if bias in tensors:
        tensors[bias] = tensors[bias] / scales
        factors[bias] = 1 / scales
    for reader in pair.readers:
        tensors[reader] = tensors[reader] * scales
    return factors | dict.fromkeys(pair.readers, scales)


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")
