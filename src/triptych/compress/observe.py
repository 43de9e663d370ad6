"""Watch towers while calibrating: static scales until they stand still, gradients where streams meet."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from triptych.core.spec import Modality
from triptych.errors import ConfigError

logger = logging.getLogger(__name__)
INTERVALS: Mapping[Modality, int] = {Modality.IMAGE: 50, Modality.AUDIO: 10}  # the article's; docs/concepts


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    """When a scale is taken up, and when it is left alone.

    interval: calibration steps between updates. momentum: the newest peak's part of the scale. The scale is settled
    once `patience` updates on end each moved it by less than `tolerance` of itself. A momentum as small as the
    tolerance would call any scale settled.
    """

    interval: int = 1
    momentum: float = 0.1
    tolerance: float = 0.01
    patience: int = 8
    bits: int = 8

    def __post_init__(self) -> None:
        if self.interval < 1 or self.patience < 1 or not self.tolerance < self.momentum <= 1:
            raise ConfigError(
                f"interval {self.interval}, patience {self.patience}, momentum {self.momentum}",
                hint=f"both counts are at least 1, the momentum is above the tolerance {self.tolerance} and at most 1",
            )


@dataclass(slots=True, kw_only=True)
class ScaleObserver:
    """The static scale of one input: an exponential mean of the greatest magnitudes. It changes with `see` alone."""

    config: ObserverConfig = field(default_factory=ObserverConfig)
    scale: float | None = None  # None until the first update
    num_steps: int = 0  # seen; those after settling do not count
    num_updates: int = 0
    _peak: float = 0.0  # since the last update
    _num_still: int = 0

    @property
    def is_settled(self) -> bool:
        return self._num_still >= self.config.patience

    def see(self, x: Tensor) -> None:
        """One calibration step's values; after settling they are not looked at."""
        if self.is_settled:
            return
        self._peak = max(self._peak, float(x.abs().max()))
        self.num_steps += 1
        if self.num_steps % self.config.interval == 0:
            self._update(self._peak / ((1 << (self.config.bits - 1)) - 1))
            self._peak = 0.0

    def _update(self, newest: float) -> None:
        self.num_updates += 1
        if self.scale is None:
            self.scale = newest
            return
        old, self.scale = self.scale, self.scale + self.config.momentum * (newest - self.scale)
        is_still = abs(self.scale - old) < self.config.tolerance * old
        self._num_still = self._num_still + 1 if is_still else 0


def watching(observers: Mapping[str, ScaleObserver]) -> Callable[[str, Tensor], Tensor]:
    """For `Hooks.on_input`: the inputs of the weights named are seen, all pass unchanged."""

    def see(name: str, x: Tensor) -> Tensor:
        if name in observers:
            observers[name].see(x)
        return x

    return see


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """How alike the loss pulls at the streams' shared channels in one step.

    norms: of each stream, the gradient's root mean square over rows, taken over channels. cosines: between two
    streams, of these magnitudes by channel: 1 where they pull at the same channels, 0 where at different ones.
    """

    step: int
    norms: Mapping[Modality, float]
    cosines: Mapping[tuple[Modality, Modality], float]

    @property
    def ratio(self) -> float:
        """Of the greatest norm to the least; infinite when a stream gets no gradient."""
        least = min(self.norms.values())
        return max(self.norms.values()) / least if least > 0 else math.inf


def alignment(step: int, gradients: Mapping[Modality, Tensor]) -> Alignment:
    """Of the loss's gradients at each stream's rows, (N, width) in one width. A measure: it changes nothing."""
    profiles = {modality: rows.double().square().mean(0).sqrt() for modality, rows in gradients.items()}
    found = Alignment(
        step=step,
        norms={modality: float(profile.norm()) for modality, profile in profiles.items()},
        cosines={
            (one, other): float(torch.cosine_similarity(profiles[one], profiles[other], dim=0))
            for one, other in combinations(profiles, 2)
        },
    )
    logger.info("step %d: gradient norms %s, ratio %.3g", step, dict(found.norms), found.ratio)
    return found
