"""One scale a channel where several encoders' rows meet, found for the stream that fares worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.core.spec import Modality
from triptych.errors import ConfigError

Weighting = Literal["worst", "maxmin", "equal", "snr"]
Streams = Mapping[Modality, Tensor]  # of each encoder, rows (N, width) in the width that they share
LEAST_CLIP = 0.25  # of the quietest stream's peak: below it nothing was ever better
FLOOR = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseConfig:
    """How streams share scales: s_c = argmin_s Σ_m w_m E_m(s), the error's energy as a share of the stream's own.

    weighting
      worst:  w ∝ 1 / SQNR, found again with each round's scales, until they stay
      maxmin: w grows by what each stream lacks: the worst SQNR as great as it can be
      equal:  one weight for all
      snr:    w ∝ SQNR, the naive reading of «SNR-weighted»: what is best served is served first
    """

    weighting: Weighting = "worst"
    bits: int = 8
    points: int = 40  # scales tried a channel
    rounds: int = 40  # at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """scales: (width,) the step of each channel. `sqnr_db` and `weights` are each stream's, at these scales."""

    scales: Tensor
    sqnr_db: Mapping[Modality, float]
    weights: Mapping[Modality, float]
    rounds: int


def fuse(streams: Streams, config: FuseConfig = FuseConfig()) -> Fusion:  # noqa: B008
    """Shared scales. Of one stream alone these are its own best: the upper bound of what sharing can give.

    Raises ConfigError where streams differ in width, or one is empty, silent or not finite.
    """
    _check(streams)
    tried = _candidates(streams, config)
    shares = torch.stack([_errors(rows, tried, config.bits) for rows in streams.values()])
    weights = torch.full((len(shares),), 1 / len(shares), dtype=shares.dtype)
    errors = shares[:, 0].sum(1)  # at the scales of the loudest: where everybody starts
    best = None
    for round_ in range(1, config.rounds + 1):
        weights = _reweighted(weights, errors, config.weighting)
        choice = torch.einsum("m,mgc->gc", weights, shares).argmin(0)
        errors = shares.gather(1, choice.expand(len(shares), 1, -1)).sum((1, 2))
        found = (float(errors.max()), choice, errors, weights, round_)
        is_still = best is not None and torch.equal(choice, best[1])
        if best is None or config.weighting in ("equal", "snr") or found[0] < best[0]:
            best = found
        if is_still and config.weighting != "maxmin":
            break
    assert best is not None
    _, choice, errors, weights, _ = best
    return Fusion(
        scales=tried.gather(0, choice[None])[0],
        sqnr_db=dict(zip(streams, (-10 * errors.clamp(min=FLOOR).log10()).tolist(), strict=True)),
        weights=dict(zip(streams, weights.tolist(), strict=True)),
        rounds=round_,
    )


def loudest(streams: Streams, bits: int = 8) -> Tensor:
    """What calibrating on all rows alike gives: the step that reaches each channel's greatest value, (width,)."""
    _check(streams)
    peaks = torch.stack([rows.abs().amax(0).double() for rows in streams.values()]).amax(0)
    return torch.where(peaks > 0, peaks, torch.ones_like(peaks)) / _top(bits)


def sqnr_db(rows: Tensor, scales: Tensor, bits: int = 8) -> float:
    """Energy of `rows` over that of their rounding errors, in decibels."""
    return -10 * float(_errors(rows, scales[None], bits).sum().clamp(min=FLOOR).log10())


def folded(scales: Tensor) -> tuple[Tensor, float]:
    """What makes per-channel steps run as one: (divisor (width,), input scale).

    Rows are divided by the divisor, in the norm or linear before, and the weight's columns multiplied by it; then one
    static scale does what the channels' own did, exactly: round(x / divisor / input scale) = round(x / scales).
    """
    greatest = float(scales.max())
    return scales / greatest, greatest


def _candidates(streams: Streams, config: FuseConfig) -> Tensor:
    """(points, width) from the loudest stream's peak down to a share of the quietest's, by equal ratios."""
    top = loudest(streams, config.bits)
    peaks = torch.stack([rows.abs().amax(0).double() for rows in streams.values()]) / _top(config.bits)
    least = torch.where(peaks > 0, peaks, top).amin(0) * LEAST_CLIP
    shares = torch.linspace(0, 1, config.points, dtype=torch.double)[:, None]
    return top * (least / top) ** shares


def _errors(rows: Tensor, tried: Tensor, bits: int) -> Tensor:
    """(points, width): each channel's squared error at each scale, as a share of the whole stream's energy."""
    rows = rows.double()
    top = _top(bits)
    lost = [(rows - (rows / scale).round().clamp(-top - 1, top) * scale).square().sum(0) for scale in tried]
    return torch.stack(lost) / rows.square().sum()


def _reweighted(weights: Tensor, errors: Tensor, weighting: Weighting) -> Tensor:
    """Half a step, in logarithms, to the weights that these errors ask for: whole steps may swing to and fro."""
    errors = errors.clamp(min=FLOOR)
    aims = {"worst": errors, "maxmin": weights * errors, "equal": torch.ones_like(errors), "snr": 1 / errors}
    aim = aims[weighting] / aims[weighting].sum()
    moved = (weights * aim).sqrt()
    return moved / moved.sum()


def _top(bits: int) -> int:
    return int((1 << (bits - 1)) - 1)


def _check(streams: Streams) -> None:
    widths = {name: rows.shape[-1] for name, rows in streams.items()}
    if not streams or len(set(widths.values())) != 1 or any(rows.ndim != 2 for rows in streams.values()):
        raise ConfigError(f"streams of widths {widths} share no channels", hint="rows (N, width) after the projectors")
    for name, rows in streams.items():
        if not bool(torch.isfinite(rows).all()) or not bool(rows.any()):
            raise ConfigError(
                f"the {Modality(name).name.lower()} stream is empty, silent or not finite",
                hint="calibrate on samples of every modality",
            )
