"""GPTQ: each column is rounded, and its error made good by those that follow (arXiv:2210.17323)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.compress.rounding import Grid, Steps, decode, encode, find_steps, grouped, pack, stored
from triptych.core.quantized import Quantized
from triptych.errors import CheckpointError

BLOCK = 64  # columns whose errors are handed on to the rest in one product
DAMPING = 1.0  # of the gram's mean diagonal, added to it. The paper's 0.01 did worse than rounding to nearest on texts
# of another kind than the 4,096 tokens of calibration: docs/journal.md
DEFAULT_ROUNDS = 1  # of polishing after GPTQ; more change nothing that can be measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """by_activation: columns with the most energy first; groups stay where they are, so no index is stored.
    rounds: of refitting all scales of a row at once and descending by single codes (arXiv:2309.01885); 0 is GPTQ.
    """

    by_activation: bool = True
    damping: float = DAMPING
    rounds: int = DEFAULT_ROUNDS


def gptq(weight: Tensor, gram: Tensor, grid: Grid, effort: Effort = Effort()) -> Quantized:  # noqa: B008
    """Round (rows, width) so that its products with the calibration inputs change least.

    gram: Σ importance · x xᵀ over the tokens, (width, width). Scales come from the clipping search, each channel
    weighted by what its error costs once the others have made it good. Raises CheckpointError when the gram is not
    one, or as `round_weight` does.
    """
    groups = grouped(weight, grid)
    hessian = _damped(gram, weight.shape[1], effort.damping)
    order = torch.arange(len(hessian))
    if effort.by_activation:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    upper = _upper(hessian[order][:, order])
    steps = find_steps(groups, grid, importance=_alone(upper, order))
    codes = _by_columns(groups, upper, steps, grid, order)
    for _ in range(effort.rounds):
        steps = _refit(groups, hessian, steps, grid, codes)
        codes = _descend(groups, hessian, steps, grid, codes)
    return pack(codes, steps, grid, tuple(weight.shape))


def error(weight: Tensor, back: Tensor, gram: Tensor) -> float:
    """Squared error of the products, Σ importance · |(weight - back) x|²."""
    lost = weight.float() - back.float()
    return float(torch.einsum("rw,wv,rv->", lost, gram.float(), lost))


def _damped(gram: Tensor, width: int, damping: float) -> Tensor:
    """A channel that no token used counts like the least of the damping, and rounds to nearest."""
    if gram.shape != (width, width):
        raise CheckpointError(f"the gram is {tuple(gram.shape)} for a weight of width {width}")
    if not bool(torch.isfinite(gram).all()) or bool((gram.diagonal() < 0).any()) or not bool(gram.any()):
        raise CheckpointError("the gram is empty or not finite", hint="calibrate on samples that reach this layer")
    hessian = gram.float() / gram.diagonal().mean().float()
    return hessian + damping * torch.eye(width)


def _alone(upper: Tensor, order: Tensor) -> Tensor:
    """What an error of each column costs once all others have made it good, 1 / diag H⁻¹, in the weight's own order."""
    found = torch.empty(len(order))
    found[order] = 1 / upper.square().sum(0)
    return found


def _by_columns(groups: Tensor, upper: Tensor, steps: Steps, grid: Grid, order: Tensor) -> Tensor:
    """Codes (rows, groups, size). The paper's loop, rows together, errors handed on in blocks."""
    rows, _, size = groups.shape
    left = groups.reshape(rows, -1)[:, order]
    width = left.shape[1]
    codes = torch.empty_like(left)
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        errors = torch.empty(rows, stop - start)
        for column in range(start, stop):
            own = _column(steps, int(order[column]) // size)
            value = left[:, column : column + 1]
            codes[:, column : column + 1] = encode(value, own, grid)
            lost = (value - decode(codes[:, column : column + 1], own)) / upper[column, column]
            left[:, column:stop] -= lost * upper[column, column:stop]
            errors[:, column - start : column - start + 1] = lost
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    back = torch.empty_like(codes)
    back[:, order] = codes
    return back.reshape(groups.shape)


def _upper(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor U of the inverse, H⁻¹ = Uᵀ U, without the inverse: from H's own, last column first."""
    lower = torch.linalg.cholesky(hessian.double().flip(0, 1))
    eye = torch.eye(len(hessian), dtype=torch.float64)
    return torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1).float()


def _descend(groups: Tensor, hessian: Tensor, steps: Steps, grid: Grid, codes: Tensor) -> Tensor:
    """One sweep of coordinate descent: each code in turn to where, all others fixed, the error is least."""
    rows, _, size = groups.shape
    back = decode(codes, steps).reshape(rows, -1)
    slope = (groups.reshape(rows, -1) - back) @ hessian
    codes = codes.reshape(rows, -1).clone()
    for start in range(0, codes.shape[1], BLOCK):
        stop = min(start + BLOCK, codes.shape[1])
        moved = torch.zeros(rows, stop - start)
        for column in range(start, stop):
            own = _column(steps, column // size)
            old = back[:, column : column + 1]
            code = encode(old + slope[:, column : column + 1] / hessian[column, column], own, grid)
            delta = decode(code, own) - old
            codes[:, column : column + 1] = code
            moved[:, column - start : column - start + 1] = delta
            slope[:, start:stop] -= delta * hessian[column, start:stop]
        slope[:, stop:] -= moved @ hessian[start:stop, stop:]
    return codes.reshape(groups.shape)


def _refit(groups: Tensor, hessian: Tensor, steps: Steps, grid: Grid, codes: Tensor) -> Steps:
    """All scales of a row at once, by least squares for its codes; kept for rows where the stored ones err less."""
    rows, count, size = groups.shape
    units = codes - steps.zero
    flat = groups.reshape(rows, -1)
    normal = torch.empty(rows, count, count)
    for group in range(count):
        spread = units[:, group] @ hessian[group * size : (group + 1) * size]
        normal[:, group] = (spread.reshape(rows, count, size) * units).sum(-1)
    aim = ((flat @ hessian).reshape(rows, count, size) * units).sum(-1)
    ridge = 1e-4 * normal.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-12)
    eye = torch.eye(count)[None] * ridge[:, None, None]
    old = steps.scale[..., 0]
    shift = torch.linalg.solve(normal + eye, aim - (normal @ old[..., None])[..., 0])
    scale = stored((old + shift)[..., None], grid)

    def err(scales: Tensor) -> Tensor:
        lost = (groups - units * scales).reshape(rows, -1)
        return ((lost @ hessian) * lost).sum(-1)

    wins = (err(scale) < err(steps.scale))[:, None, None]
    return Steps(scale=torch.where(wins, scale, steps.scale), zero=steps.zero)


def _column(steps: Steps, group: int) -> Steps:
    return Steps(scale=steps.scale[:, group], zero=steps.zero[:, group])
