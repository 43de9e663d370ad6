"""SmoothQuant: what is hard to round moves into weights; what modalities lose by sharing scales.

One scale an input channel: x / s meets W · s. It serves activations in 8 bits, whose one step a row or a tensor is set
by the loudest channel (arXiv:2211.10438). Where modalities meet, the loudest of them sets it for all; scales of each
one's own would be best (arXiv:2603.04800) but then every modality needs a weight of its own. With one weight, a step of
its own for each modality is what can be had, since a step multiplies whole rows (arXiv:2502.00425).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.spec import Modality

LEAST = 1e-5  # of a channel's range: one that no token used is left alone
ALPHA = 0.5  # share of the difficulty that moves into the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Signal to noise of one modality's rounded activations in dB: everything shared, its own step, its own scales."""

    shared: float
    own_step: float
    own_scales: float

    @property
    def lost(self) -> float:
        """What a unified scale and step cost this modality, in dB."""
        return self.own_scales - self.shared


def smooth_scales(x_max: Tensor, w_max: Tensor, alpha: float = ALPHA) -> Tensor:
    """s = max|x|^a / max|w|^(1 - a) of each channel, (width,). Channels without a range get 1."""
    scales = x_max.float().clamp(min=LEAST).pow(alpha) / w_max.float().clamp(min=LEAST).pow(1 - alpha)
    idle = (x_max < LEAST) | (w_max < LEAST)
    return torch.where(idle, torch.ones_like(scales), scales)


def modality_scales(
    x_max: Mapping[Modality, Tensor], w_max: Tensor, alpha: float = ALPHA
) -> dict[Modality | None, Tensor]:
    """The scales of each modality alone, and under None those of all together: by the loudest in each channel."""
    loudest = torch.stack(list(x_max.values())).amax(0)
    own: dict[Modality | None, Tensor] = {each: smooth_scales(found, w_max, alpha) for each, found in x_max.items()}
    return own | {None: smooth_scales(loudest, w_max, alpha)}


def sharing(
    x: Mapping[Modality, Tensor], w_max: Tensor, *, bits: int = 8, alpha: float = ALPHA
) -> dict[Modality, Sharing]:
    """What each modality's tokens (n, width) lose when scales and the static step are shared."""
    scales = modality_scales({each: rows.abs().amax(0) for each, rows in x.items()}, w_max, alpha)
    together = scales[None]
    step = max(float((rows / together).abs().max()) for rows in x.values())
    return {
        each: Sharing(
            shared=_sqnr(rows, together, step, bits),
            own_step=_sqnr(rows, together, None, bits),
            own_scales=_sqnr(rows, scales[each], None, bits),
        )
        for each, rows in x.items()
    }


def _sqnr(x: Tensor, scales: Tensor, reach: float | None, bits: int) -> float:
    """10 log10 of signal over noise, rounding x / s symmetrically over ±reach; None: over its own range."""
    y = x / scales
    top = (1 << (bits - 1)) - 1
    step = max(float(y.abs().max()) if reach is None else reach, LEAST) / top
    back = torch.clamp(torch.round(y / step), -top - 1, top) * step * scales
    noise = (back - x).square().sum().clamp(min=1e-30)
    return float(10 * torch.log10(x.square().sum() / noise))
