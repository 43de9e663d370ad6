"""GPTQ: that it is the paper's loop, and that each step after it lowers the error."""

import numpy as np
import pytest
import torch

from triptych.compress.gptq import DAMPING, Effort, error, gptq
from triptych.compress.rounding import Grid, decode, encode, find_steps, grouped, round_weight
from triptych.core.quantized import dequantize
from triptych.errors import CheckpointError

PLAIN = Effort(by_activation=False, rounds=0, damping=0.01)


def inputs(seed: int, tokens: int = 300, width: int = 64) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, width)) @ rng.standard_normal((width, width))
    return torch.from_numpy((mixed * np.exp(rng.standard_normal(width))).astype(np.float32))


def matrix(seed: int, rows: int = 12, width: int = 64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32))


def by_the_paper(weight: torch.Tensor, gram: torch.Tensor, grid: Grid, order: list[int]) -> np.ndarray:
    """Optimal brain quantization in a fixed order: round one column, solve the rest for the error, shrink H⁻¹."""
    hessian = gram.double() / gram.diagonal().mean() + DAMPING * torch.eye(len(gram), dtype=torch.float64)
    left, back = weight.double().clone(), torch.empty_like(weight)
    inverse = torch.linalg.inv(hessian)
    steps = find_steps(grouped(weight, grid), grid, importance=1 / inverse.diagonal().float())
    for column in order:
        group = column // grid.size(len(gram))
        own = type(steps)(scale=steps.scale[:, group], zero=steps.zero[:, group])
        value = left[:, column : column + 1]
        back[:, column : column + 1] = decode(encode(value.float(), own, grid), own)
        lost = (value[:, 0] - back[:, column]) / inverse[column, column]
        left -= lost[:, None] * inverse[column]
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column, column] = 1.0  # done with
    return back.numpy()


@pytest.mark.parametrize("by_activation", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_it_is_the_papers_loop(by_activation, symmetric):
    weight, x, grid = matrix(0), inputs(1), Grid(bits=4, group_size=32, symmetric=symmetric)
    gram = x.T @ x
    order = torch.argsort(gram.diagonal(), descending=True, stable=True).tolist() if by_activation else list(range(64))

    ours = dequantize(gptq(weight, gram, grid, Effort(by_activation=by_activation, rounds=0)))

    same = np.isclose(ours, by_the_paper(weight, gram, grid, order), atol=1e-5).mean()
    assert same > 0.99  # a value halfway between two codes may fall either way: f32 against f64


def test_each_step_lowers_the_error():
    weight, x, grid = matrix(0), inputs(1), Grid(bits=4, group_size=32)
    gram = x.T @ x

    def lost(held) -> float:
        return error(weight, torch.from_numpy(dequantize(held)), gram)

    nearest, plain = lost(round_weight(weight, grid)), lost(gptq(weight, gram, grid, PLAIN))
    polished = lost(gptq(weight, gram, grid, Effort(damping=0.01)))

    assert polished < 0.97 * plain
    assert plain < 0.6 * nearest


def test_inputs_that_do_not_hang_together_leave_rounding_to_nearest():
    weight, grid = matrix(0), Grid(bits=4, group_size=32)

    held = gptq(weight, torch.eye(64), grid, PLAIN)

    np.testing.assert_array_equal(held.codes, round_weight(weight, grid).codes)


def test_a_channel_that_no_token_used_does_not_matter_and_does_no_harm():
    weight, x, grid = matrix(0), inputs(1), Grid(bits=4, group_size=32)
    x[:, 5] = 0

    held = gptq(weight, x.T @ x, grid)

    assert np.isfinite(dequantize(held)).all()
    assert abs(dequantize(held)[:, 5] - weight[:, 5].numpy()).max() < 1.0


@pytest.mark.parametrize("gram", [torch.zeros(64, 64), torch.full((64, 64), torch.nan), torch.eye(32)])
def test_a_gram_that_is_none_is_refused(gram):
    with pytest.raises(CheckpointError, match="gram"):
        gptq(matrix(0), gram, Grid(bits=4, group_size=32))
