"""GPTQ: each column is rounded, and its error made good by those that follow (arXiv:2210.17323)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.compress.rounding import Grid, Steps, decode, find_steps, grouped, pack, stored
from triptych.core.quantized import Quantized
from triptych.errors import CheckpointError

BLOCK = 64  # columns whose errors are handed on to the rest in one product
TURNS = 16  # in which rows are rounded where those left make good what those before them err
ROUNDS = 1  # of refitting all scales of a row at once and descending by single codes (arXiv:2309.01885). More change
# nothing that can be measured; 0 is GPTQ
DAMPING = 1.0  # of the gram's mean diagonal, added to it. The paper's 0.01 did worse than rounding to nearest on texts
# of another kind than the 4,096 tokens of calibration: docs/journal.md
OUTPUTS_DAMPING = 0.2
PRIOR_TOKENS = 8192  # that damping counts for where more were seen

Columns = NDArray[np.float32]  # (columns, rows): numpy's calls on a column are short, and torch's are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Factored:
    """A damped gram. order: the most energy first; upper: of H⁻¹ = Uᵀ U, in that order. Groups stay where they are.
    alone: what a column's error costs once all others have made it good."""

    hessian: Tensor
    order: Tensor
    upper: Tensor
    alone: Tensor


def factored(gram: Tensor, damping: float = DAMPING) -> Factored:
    """Σ importance · x xᵀ over the tokens, (width, width). Raises CheckpointError when it is no gram."""
    hessian, order = _damped(gram, damping)
    lower = _lower(hessian, order)
    eye = torch.eye(len(lower), dtype=torch.float64)
    upper = torch.linalg.solve_triangular(lower, eye, upper=False).flip(0, 1).float()
    alone = torch.empty(len(order))
    alone[order] = 1 / upper.square().sum(0)
    return Factored(hessian=hessian, order=order, upper=upper, alone=alone)


def gptq(
    weight: Tensor, inputs: Factored, grid: Grid, outputs: Tensor | None = None, rounds: int = ROUNDS
) -> Quantized:
    """Round (rows, width) so that its products with the calibration inputs change least.

    inputs: their gram. outputs: Σ g gᵀ of the products' gradients in blocks of rows, as `blocks` has them: then
    tr(outputs · E · gram · Eᵀ) is made least, rows making good what those of their block before them err
    (arXiv:2505.22988). Scales come from the clipping search, each channel weighted by what its error costs once the
    others have made it good. Raises CheckpointError when the gram is of another width, or as `round_weight` does.
    """
    if len(inputs.order) != weight.shape[1]:
        raise CheckpointError(f"the gram has {len(inputs.order)} channels, the weight is {tuple(weight.shape)}")
    if outputs is None:
        codes, steps = _rounded(grouped(weight, grid), inputs, grid, rounds)
        return pack(codes, steps, grid, tuple(weight.shape))
    found = [
        _in_turns(own, inputs, grid, felt, rounds) if felt.any() else _rounded(grouped(own, grid), inputs, grid, rounds)
        for own, felt in zip(weight.split(outputs.shape[1]), blocks(outputs), strict=True)
    ]
    codes, scale, zero = (torch.cat(parts) for parts in zip(*((c, s.scale, s.zero) for c, s in found), strict=True))
    return pack(codes, Steps(scale=scale, zero=zero), grid, tuple(weight.shape))


def blocks(outputs: Tensor) -> list[Tensor]:
    """Squares of (rows, size), which holds of each row what its own block has; the last may be smaller."""
    return [own[:, : len(own)] for own in outputs.split(outputs.shape[1])]


def made_good(outputs: Tensor) -> float:
    """What is left of the cost of rounding once rows make good what others err; 1 where outputs are felt apart."""
    felt = [own for own in blocks(outputs) if own.any()]
    whole = sum(float(own.trace()) for own in felt)
    return sum(float(own.trace()) / whole * _left(own) for own in felt) if felt else 1.0


def _left(outputs: Tensor) -> float:
    hessian, order = _damped(outputs, OUTPUTS_DAMPING)
    return float(_lower(hessian, order).diagonal().square().mean() / hessian.diagonal().mean())


def _in_turns(weight: Tensor, inputs: Factored, grid: Grid, outputs: Tensor, rounds: int) -> tuple[Tensor, Steps]:
    """As `_rounded`, of rows whose products' gradients are known."""
    felt, found = factored(outputs, OUTPUTS_DAMPING), []
    left, size = weight.float()[felt.order], -(-len(weight) // TURNS)
    for start in range(0, len(left), size):
        stop = min(start + size, len(left))
        codes, steps = _rounded(grouped(left[start:stop], grid), inputs, grid, rounds)
        found.append((codes, steps.scale, steps.zero))
        lost = left[start:stop] - decode(codes, steps).flatten(1)
        lost = torch.linalg.solve_triangular(felt.upper[start:stop, start:stop].T, lost, upper=False)
        left[stop:] -= felt.upper[start:stop, stop:].T @ lost
    codes, scale, zero = (torch.cat(parts)[felt.order.argsort()] for parts in zip(*found, strict=True))
    return codes, Steps(scale=scale, zero=zero)


def _damped(gram: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Of mean diagonal 1 before, and its order. A channel that no token used counts like the least of it, and rounds
    to nearest."""
    if not bool(torch.isfinite(gram).all()) or bool((gram.diagonal() < 0).any()) or not bool(gram.any()):
        raise CheckpointError("the gram is empty or not finite", hint="calibrate on samples that reach this layer")
    hessian = gram.float() / gram.diagonal().mean().float() + damping * torch.eye(len(gram))
    return hessian, torch.argsort(hessian.diagonal(), descending=True, stable=True)


def _lower(hessian: Tensor, order: Tensor) -> Tensor:
    """The Cholesky factor of H, last column first: its inverse, turned about, is the upper one of H⁻¹."""
    return torch.linalg.cholesky(hessian[order][:, order].double().flip(0, 1))


def _rounded(groups: Tensor, inputs: Factored, grid: Grid, rounds: int) -> tuple[Tensor, Steps]:
    """Codes (rows, groups, size) and their steps, of rows that know nothing of each other."""
    steps = find_steps(groups, grid, importance=inputs.alone)
    codes = _by_columns(groups, inputs, steps, grid)
    for _ in range(rounds):
        steps = _refit(groups, inputs.hessian, steps, grid, codes)
        codes = _descend(groups, inputs.hessian, steps, grid, codes)
    return codes, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lattice:
    """Where values of some columns may lie: between `least` and `most` times their `scale`."""

    scale: Columns
    least: Columns
    most: Columns

    @classmethod
    def of(cls, steps: Steps, grid: Grid, groups: Tensor) -> _Lattice:
        """groups: which one each column is in."""
        scale, zero = (each[..., 0].T[groups].contiguous().numpy() for each in (steps.scale, steps.zero))
        return cls(scale=scale, least=-zero, most=grid.top - zero)

    def round(self, column: int, value: Columns, units: Columns, back: Columns) -> None:
        """`encode`, but for the zero, into `units`; `decode` into `back`."""
        scale = self.scale[column]
        np.divide(value, scale, out=units)
        np.rint(units, out=units)
        np.maximum(units, self.least[column], out=units)
        np.minimum(units, self.most[column], out=units)
        np.multiply(units, scale, out=back)


def _by_columns(groups: Tensor, inputs: Factored, steps: Steps, grid: Grid) -> Tensor:
    """Codes (rows, groups, size). The paper's loop, rows together, errors handed on in blocks."""
    (rows, _, size), upper = groups.shape, inputs.upper
    left = groups.reshape(rows, -1)[:, inputs.order]
    units = torch.empty(left.shape)
    for start in range(0, left.shape[1], BLOCK):
        stop = start + BLOCK
        places = inputs.order[start:stop]
        lattice = _Lattice.of(steps, grid, places // size)
        found, errors = _handed_on(_columns(left[:, start:stop]), upper[start:stop, start:stop].numpy(), lattice)
        units[:, places] = torch.from_numpy(found).T
        left[:, stop:] -= torch.from_numpy(errors).T.contiguous() @ upper[start:stop, stop:]
    return units.reshape(groups.shape) + steps.zero


@np.errstate(over="ignore")  # a group of next to nothing has a scale of next to nothing
def _handed_on(left: Columns, upper: Columns, lattice: _Lattice) -> tuple[Columns, Columns]:
    """Units and errors of a block's columns; `left` is changed, for each to make good what those before it err."""
    units, errors, shares = np.empty_like(left), np.empty_like(left), np.empty_like(left)
    for column, (value, lost) in enumerate(zip(left, errors, strict=True)):
        lattice.round(column, value, units[column], lost)
        np.subtract(value, lost, out=lost)
        np.divide(lost, upper[column, column], out=lost)
        rest = slice(column + 1, None)
        np.multiply(upper[column, rest, None], lost, out=shares[rest])
        np.subtract(left[rest], shares[rest], out=left[rest])
    return units, errors


def _descend(groups: Tensor, hessian: Tensor, steps: Steps, grid: Grid, codes: Tensor) -> Tensor:
    """One sweep of coordinate descent: each code in turn to where, all others fixed, the error is least."""
    rows, _, size = groups.shape
    back = decode(codes, steps).reshape(rows, -1)
    slope = (groups.reshape(rows, -1) - back) @ hessian
    units = torch.empty(back.shape)
    for start in range(0, back.shape[1], BLOCK):
        stop = start + BLOCK
        lattice = _Lattice.of(steps, grid, torch.arange(start, min(stop, back.shape[1])) // size)
        block = hessian[start:stop, start:stop].numpy()
        found, moves = _moved(_columns(slope[:, start:stop]), _columns(back[:, start:stop]), block, lattice)
        units[:, start:stop] = torch.from_numpy(found).T
        slope[:, stop:] -= torch.from_numpy(moves).T.contiguous() @ hessian[start:stop, stop:]
    return units.reshape(groups.shape) + steps.zero


@np.errstate(over="ignore")
def _moved(slope: Columns, back: Columns, hessian: Columns, lattice: _Lattice) -> tuple[Columns, Columns]:
    """Units of a block's columns and by how much they move; `slope` is changed as they do."""
    units, moves, shares = np.empty_like(slope), np.empty_like(slope), np.empty_like(slope)
    for column, (old, delta) in enumerate(zip(back, moves, strict=True)):
        near = units[column]
        np.divide(slope[column], hessian[column, column], out=near)
        np.add(old, near, out=near)
        lattice.round(column, near, near, delta)
        np.subtract(delta, old, out=delta)
        rest = slice(column + 1, None)
        np.multiply(hessian[column, rest, None], delta, out=shares[rest])
        np.subtract(slope[rest], shares[rest], out=slope[rest])
    return units, moves


def _columns(block: Tensor) -> Columns:
    """(rows, columns) → (columns, rows)."""
    return np.ascontiguousarray(block.T.numpy())


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
