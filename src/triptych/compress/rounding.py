"""Round a matrix to few bits: to nearest, with ranges clipped where that lowers the weighted error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.quantized import Quantized, dequantize
from triptych.errors import CheckpointError, ConfigError

ScaleType = Literal["float16", "bfloat16", "float32"]
STORED: dict[ScaleType, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
CHUNK_VALUES = 1 << 18  # 1 MiB of f32: the search's temporaries stay in a core's cache
RATIOS = tuple(1.08 - 0.04 * step for step in range(16))  # of the whole range, down to 0.48
REFITS = 2  # times the scale is fitted to the codes it gave (least squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """On which numbers a weight may lie. `group_size`: neighbours along the width that share a scale; None: a row.

    A symmetric grid has its zero in the middle, `2^(bits - 1)`, and reaches one step further below than above.
    """

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    scale_type: ScaleType = "float16"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ConfigError(f"{self.bits} bits", hint="weights are rounded to 2, 3, … or 8 bits")
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(f"groups of {self.group_size}", hint="32, 64 or 128; none for whole rows")

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def size(self, width: int) -> int:
        return width if self.group_size is None else self.group_size

    def num_bits(self, rows: int, width: int) -> int:
        """Of storage, scales and zero points included."""
        groups = rows * (width // self.size(width))
        wide = 32 if self.scale_type == "float32" else 16
        return rows * width * self.bits + groups * (wide if self.symmetric else wide + self.bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Of each group its scale, as it is stored, and its zero point; both (rows, groups, 1) f32."""

    scale: Tensor
    zero: Tensor


def fitted(grid: Grid, name: str, width: int) -> tuple[Grid, str | None]:
    """`grid` with groups that divide `width`, and a sentence where that is not the one that was asked.

    The greatest power of two under the asked size that divides, 16 at least; else a group is a whole row.
    """
    size = grid.size(width)
    if width % size == 0:
        return grid, None
    fits = [divisor for divisor in (1 << power for power in range(4, 13)) if divisor < size and width % divisor == 0]
    found = max(fits, default=None)
    words = f"groups of {found}" if found else "one group a row"
    return replace(grid, group_size=found), f"{name}: width {width:,} is not a multiple of {size}: {words}"


def round_weight(weight: Tensor, grid: Grid, *, importance: Tensor | None = None, clip: bool = True) -> Quantized:
    """Round (rows, width) to nearest on the grid whose scales leave the least squared error.

    `importance` (width,) weighs the error of each input channel, e.g. by its mean square on calibration tokens.
    `clip` False spreads the steps over the whole range. Raises CheckpointError on values that are not finite or a
    width that is no multiple of the group.
    """
    groups = grouped(weight, grid)
    steps = find_steps(groups, grid, importance=importance, clip=clip)
    return pack(encode(groups, steps, grid), steps, grid, tuple(weight.shape))


def fake_quantized(weight: Tensor, grid: Grid, *, importance: Tensor | None = None, clip: bool = True) -> Tensor:
    """What `round_weight` stands for, in f32: literally its dequantized codes."""
    return torch.from_numpy(dequantize(round_weight(weight, grid, importance=importance, clip=clip)))


def grouped(weight: Tensor, grid: Grid) -> Tensor:
    """(rows, width) → (rows, groups, size) in f32. Raises CheckpointError as `round_weight` does."""
    rows, width = weight.shape
    size = grid.size(width)
    if width == 0 or width % size:
        raise CheckpointError(f"width {width} is not a multiple of {size}", hint="`fitted` finds groups that divide it")
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError("values that are not finite cannot be rounded to few bits")
    return weight.detach().float().reshape(rows, width // size, size)


def find_steps(groups: Tensor, grid: Grid, *, importance: Tensor | None = None, clip: bool = True) -> Steps:
    """The scales and zero points of `groups` (rows, groups, size), searched in chunks of rows."""
    weights = None if importance is None else importance.detach().float().reshape(1, *groups.shape[1:])
    found = [_search(groups[part], grid, weights, clip) for part in _row_chunks(groups)]
    return Steps(
        scale=torch.cat([steps.scale for steps in found]),
        zero=torch.cat([steps.zero for steps in found]),
    )


def encode(groups: Tensor, steps: Steps, grid: Grid) -> Tensor:
    """The nearest codes, f32 in [0, 2^bits - 1]."""
    return torch.clamp(torch.round(groups / steps.scale) + steps.zero, 0, grid.top)


def decode(codes: Tensor, steps: Steps) -> Tensor:
    return (codes - steps.zero) * steps.scale


def stored(scale: Tensor, grid: Grid) -> Tensor:
    """`scale` as its type holds it, in f32: codes are chosen for the scale that is used. Zero becomes one."""
    kept = scale.to(STORED[grid.scale_type]).float()
    return torch.where((kept == 0) | ~torch.isfinite(kept), torch.ones_like(kept), kept)


def pack(codes: Tensor, steps: Steps, grid: Grid, shape: tuple[int, ...]) -> Quantized:
    return Quantized(
        bits=grid.bits,
        codes=codes.to(torch.uint8).numpy(),
        scales=_narrow(steps.scale, grid.scale_type),
        zeros=steps.zero.to(torch.uint8).numpy(),
        shape=shape,
    )


def _narrow(scale: Tensor, kind: ScaleType) -> NDArray[Any]:
    values: NDArray[np.float32] = scale.numpy()
    return values.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind))


def _row_chunks(groups: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_VALUES // groups[0].numel())
    return (slice(start, start + step) for start in range(0, len(groups), step))


def _search(groups: Tensor, grid: Grid, weights: Tensor | None, clip: bool) -> Steps:
    """Try every ratio of the whole range, keep what errs least, then fit the scale to its codes."""
    if not clip:
        return next(_candidates(groups, grid, (1.0,)))
    best: Steps | None = None
    least = torch.full((*groups.shape[:2], 1), torch.inf)
    for steps in _candidates(groups, grid, RATIOS):
        best, least = _better(groups, grid, weights, (best, least), steps)
    assert best is not None
    for _ in range(REFITS):
        best, least = _better(groups, grid, weights, (best, least), _refit(groups, best, grid, weights))
    return best


def _candidates(groups: Tensor, grid: Grid, ratios: tuple[float, ...]) -> Iterator[Steps]:
    """Symmetric: both signs where clipping is searched, for the grid's longer arm may serve either side."""
    if grid.symmetric:
        scale = groups.abs().amax(-1, keepdim=True) / (grid.top / 2)
        zero = torch.full_like(scale, grid.middle)
        signs = (1.0,) if len(ratios) == 1 else (1.0, -1.0)
        yield from (Steps(scale=stored(scale * ratio * sign, grid), zero=zero) for ratio in ratios for sign in signs)
        return
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    for ratio in ratios:
        scale = stored((high / grid.top - low / grid.top) * ratio, grid)
        yield Steps(scale=scale, zero=torch.clamp(torch.round(-low * ratio / scale), 0, grid.top))


def _refit(groups: Tensor, steps: Steps, grid: Grid, weights: Tensor | None) -> Steps:
    """The scale of least weighted squares for the codes that `steps` give."""
    codes = encode(groups, steps, grid) - steps.zero
    heavy = codes if weights is None else codes * weights
    square = (heavy * codes).sum(-1, keepdim=True)
    scale = torch.where(square > 0, (heavy * groups).sum(-1, keepdim=True) / square.clamp(min=1e-30), steps.scale)
    return Steps(scale=stored(scale, grid), zero=steps.zero)


def _better(
    groups: Tensor, grid: Grid, weights: Tensor | None, best: tuple[Steps | None, Tensor], steps: Steps
) -> tuple[Steps, Tensor]:
    """The better of two in each group, and its error."""
    error = (decode(encode(groups, steps, grid), steps) - groups).square()
    error = (error if weights is None else error * weights).sum(-1, keepdim=True)
    held, least = best
    if held is None:
        return steps, error
    wins = error < least
    chosen = Steps(
        scale=torch.where(wins, steps.scale, held.scale),
        zero=torch.where(wins, steps.zero, held.zero),
    )
    return chosen, torch.where(wins, error, least)
