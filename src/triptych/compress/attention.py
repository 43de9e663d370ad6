"""The cross-modal measure: how widely text looks at media and media at text, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.compress.masks import effective_number
from triptych.core.spec import Fact, Modality

NOTABLE = 0.01  # of a row's greatest weight: what VL-Cache (arXiv:2410.23317) counts as attended to


class LayerAttention(Fact, frozen=True, kw_only=True):
    """One layer's attention, as means over its heads and the rows named here.

    Entropies are those of the weights renormalised over the other modality's keys, divided by log n for the n keys
    that a row sees: 0 looks at one token, 1 at all alike. None: there is no row that sees two such keys.

    text_media, media_text: under the causal mask. Of text only what follows a picture can look at it; of media only
    what text precedes, such as the chat's opening, can look at text.
    probe: softmax(Q_media K_textᵀ / √d) with no mask at all, so of what the model never computes (MEDA, NAACL 2025).
    effective: exp(H), how many media tokens a text row that follows them attends to.
    mass: by the modality's name, the share of the text rows' whole attention that goes to it.
    density: share of causal entries of at least 1 % of their row's greatest; of rows after the media, where there are
    any (VL-Cache).
    """

    text_media: float | None
    media_text: float | None
    probe: float | None
    effective: float | None
    mass: dict[str, float]
    density: float

    @property
    def gap(self) -> float | None:
        """|text→media − media→text| under the causal mask."""
        return _apart(self.text_media, self.media_text)

    @property
    def probe_gap(self) -> float | None:
        """The same with the unmasked probe: the article's misalignment."""
        return _apart(self.text_media, self.probe)


@dataclass(slots=True)
class Watch:
    """What looks at a decoder's attention (`backends/torch_graph.Hooks.on_attention`) and keeps what it measures.

    layers: one a layer, in their order. received: (num_media,) per layer, the attention that each media token gets
    from the text rows after it, of their whole attention, as a mean over heads and rows.
    """

    modality: NDArray[np.uint8]  # (T,) of the sequence that runs
    layers: list[LayerAttention]
    received: list[NDArray[np.float32]]

    @classmethod
    def over(cls, modality: NDArray[np.uint8]) -> Watch:
        return cls(modality=modality, layers=[], received=[])

    def __call__(self, name: str, query: Any, key: Any, value: Any) -> None:
        """Queries and keys (1, heads, T, head_dim), turned by position, as many heads of one as of the other."""
        with torch.no_grad():
            logits = (query[0] @ key[0].mT) * query.shape[-1] ** -0.5
            modality = torch.from_numpy(self.modality.astype(np.int64))
            self.layers.append(measure(logits, modality))
            is_media = modality != int(Modality.TEXT)
            rows = looking(modality)
            attention = _causal(logits)[:, rows][..., is_media]
            self.received.append(attention.mean((0, 1)).numpy() if bool(rows.any()) else np.empty(0, np.float32))


def measure(logits: Tensor, modality: Tensor) -> LayerAttention:
    """One layer's figures from its logits (heads, T, T), before mask and softmax, and the tokens' modality (T,)."""
    size = len(modality)
    is_text = modality == int(Modality.TEXT)
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    onto_media, onto_text = is_text[:, None] & ~is_text[None, :], ~is_text[:, None] & is_text[None, :]
    rows = looking(modality)
    attention = _causal(logits)
    looked = attention[:, rows if bool(rows.any()) else is_text]
    mass = {one.name.lower(): float(looked[..., modality == int(one)].sum(-1).mean()) for one in Modality}
    effective = effective_number(logits, onto_media & causal)[:, rows]
    return LayerAttention(
        text_media=entropy(logits, onto_media & causal),
        media_text=entropy(logits, onto_text & causal),
        probe=entropy(logits, onto_text),
        effective=float(effective.mean()) if bool(rows.any()) else None,
        mass={name: share for name, share in mass.items() if share},
        density=density(attention, rows if bool(rows.any()) else torch.ones_like(rows)),
    )


def looking(modality: Tensor) -> Tensor:
    """(T,) which rows are text that follows media."""
    is_media = modality != int(Modality.TEXT)
    return ~is_media & (is_media.cumsum(0) > 0)


def entropy(logits: Tensor, among: Tensor) -> float | None:
    """Mean over heads and rows of H / log n of the softmax over the n keys `among` (T, T); rows of n < 2 left out."""
    counts = among.sum(-1)
    rows = counts > 1
    if not bool(rows.any()):
        return None
    entropies = effective_number(logits[:, rows], among[rows])[..., 0].log()
    return float((entropies / counts[rows].log()).mean())


def density(attention: Tensor, rows: Tensor) -> float:
    """Share of the causal entries of `rows` that are notable; attention (heads, T, T), rows (T,) boolean."""
    held = attention[:, rows]
    notable = (held >= NOTABLE * held.amax(-1, keepdim=True)).sum()
    seen = (rows.nonzero()[:, 0] + 1).sum() * len(attention)
    return float(notable / seen)


def _causal(logits: Tensor) -> Tensor:
    mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    return torch.softmax(logits.masked_fill(~mask, -math.inf), -1)


def _apart(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else abs(one - other)


def mean_layers(samples: list[list[LayerAttention]]) -> list[LayerAttention]:
    """The samples' figures layer by layer; a figure that some samples lack is the others' mean."""
    return [_mean(list(layer)) for layer in zip(*samples, strict=True)]


def _mean(layers: list[LayerAttention]) -> LayerAttention:
    def over(figure: str) -> float | None:
        values = [value for layer in layers if (value := getattr(layer, figure)) is not None]
        return sum(values) / len(values) if values else None

    names = sorted({name for layer in layers for name in layer.mass})
    return LayerAttention(
        text_media=over("text_media"),
        media_text=over("media_text"),
        probe=over("probe"),
        effective=over("effective"),
        mass={name: sum(layer.mass.get(name, 0.0) for layer in layers) / len(layers) for name in names},
        density=over("density") or 0.0,
    )
