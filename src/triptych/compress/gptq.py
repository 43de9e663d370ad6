"""GPTQ: each column is rounded, and its error made good by those that follow (arXiv:2210.17323)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.compress.rounding import Grid, Steps, decode, encode, find_steps, grouped, pack, stored
from triptych.core.quantized import Quantized
from triptych.errors import CheckpointError

BLOCK = 64  # columns whose errors are handed on to the rest in one product
TURNS = 16  # in which rows are rounded where those left make good what those before them err
DAMPING = 1.0  # of the gram's mean diagonal, added to it. The paper's 0.01 did worse than rounding to nearest on texts
# of another kind than the 4,096 tokens of calibration: docs/journal.md
OUTPUTS_DAMPING = 0.2
PRIOR_TOKENS = 8192  # that damping counts for where more were seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """rounds: of refitting all scales of a row at once and descending by single codes (arXiv:2309.01885); 0 is GPTQ."""

    damping: float = DAMPING
    rounds: int = 1  # more change nothing that can be measured


def gptq(
    weight: Tensor,
    gram: Tensor,
    grid: Grid,
    effort: Effort = Effort(),  # noqa: B008
    outputs: Tensor | None = None,
) -> Quantized:
    """Round (rows, width) so that its products with the calibration inputs change least.

    gram: Σ importance · x xᵀ over the tokens, (width, width). outputs: Σ g gᵀ of the products' gradients, (rows, rows):
    then tr(outputs · E · gram · Eᵀ) is made least, rows making good what those before them err (arXiv:2505.22988).
    Scales come from the clipping search, each channel weighted by what its error costs once the others have made it
    good. Raises CheckpointError when a gram is not one, or as `round_weight` does.
    """
    inputs = _factored(gram, weight.shape[1], effort.damping)
    if outputs is None:
        codes, steps = _rounded(grouped(weight, grid), inputs, grid, effort.rounds)
        return pack(codes, steps, grid, tuple(weight.shape))
    felt, found = _factored(outputs, len(weight), OUTPUTS_DAMPING), []
    left, size = weight.float()[felt.order], -(-len(weight) // TURNS)
    for start in range(0, len(left), size):
        stop = min(start + size, len(left))
        codes, steps = _rounded(grouped(left[start:stop], grid), inputs, grid, effort.rounds)
        found.append((codes, steps.scale, steps.zero))
        lost = left[start:stop] - decode(codes, steps).flatten(1)
        lost = torch.linalg.solve_triangular(felt.upper[start:stop, start:stop].T, lost, upper=False)
        left[stop:] -= felt.upper[start:stop, stop:].T @ lost
    codes, scale, zero = (torch.cat(parts)[felt.order.argsort()] for parts in zip(*found, strict=True))
    return pack(codes, Steps(scale=scale, zero=zero), grid, tuple(weight.shape))


def made_good(outputs: Tensor) -> float:
    """What is left of the cost of rounding once rows make good what others err; 1 where outputs are felt apart."""
    felt = _factored(outputs, len(outputs), OUTPUTS_DAMPING)
    return float((1 / felt.upper.diagonal().square()).mean() / felt.hessian.diagonal().mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Factored:
    """A damped gram. order: the most energy first; upper: of H⁻¹ = Uᵀ U, in that order. Groups stay where they are."""

    hessian: Tensor
    order: Tensor
    upper: Tensor


def _factored(gram: Tensor, width: int, damping: float) -> _Factored:
    hessian = _damped(gram, width, damping)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    return _Factored(hessian=hessian, order=order, upper=_upper(hessian[order][:, order]))


def _damped(gram: Tensor, width: int, damping: float) -> Tensor:
    """Of mean diagonal 1 before. A channel that no token used counts like the least of it, and rounds to nearest."""
    if gram.shape != (width, width):
        raise CheckpointError(f"the gram is {tuple(gram.shape)} for a weight of width {width}")
    if not bool(torch.isfinite(gram).all()) or bool((gram.diagonal() < 0).any()) or not bool(gram.any()):
        raise CheckpointError("the gram is empty or not finite", hint="calibrate on samples that reach this layer")
    hessian = gram.float() / gram.diagonal().mean().float()
    return hessian + damping * torch.eye(width)


def _rounded(groups: Tensor, inputs: _Factored, grid: Grid, rounds: int) -> tuple[Tensor, Steps]:
    """Codes (rows, groups, size) and their steps, of rows that know nothing of each other."""
    alone = torch.empty(len(inputs.order))  # what a column's error costs once all others have made it good
    alone[inputs.order] = 1 / inputs.upper.square().sum(0)
    steps = find_steps(groups, grid, importance=alone)
    codes = _by_columns(groups, inputs, steps, grid)
    for _ in range(rounds):
        steps = _refit(groups, inputs.hessian, steps, grid, codes)
        codes = _descend(groups, inputs.hessian, steps, grid, codes)
    return codes, steps


def _by_columns(groups: Tensor, inputs: _Factored, steps: Steps, grid: Grid) -> Tensor:
    """Codes (rows, groups, size). The paper's loop, rows together, errors handed on in blocks."""
    (rows, _, size), order, upper = groups.shape, inputs.order, inputs.upper
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
