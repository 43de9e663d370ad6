"""GPTQ: that it is the paper's loop, and that each step after it lowers the error."""

import numpy as np
import pytest
import torch

from triptych.compress.gptq import BLOCK, DAMPING, OUTPUTS_DAMPING, factored, gptq, made_good
from triptych.compress.rounding import Grid, Steps, decode, encode, find_steps, grouped, round_weight
from triptych.core.quantized import dequantize
from triptych.errors import CheckpointError


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


@pytest.mark.parametrize("symmetric", [False, True])
def test_it_is_the_papers_loop(symmetric):
    weight, x, grid = matrix(0), inputs(1), Grid(bits=4, group_size=32, symmetric=symmetric)
    gram = x.T @ x
    order = torch.argsort(gram.diagonal(), descending=True, stable=True).tolist()

    ours = dequantize(gptq(weight, factored(gram), grid, rounds=0))

    same = np.isclose(ours, by_the_paper(weight, gram, grid, order), atol=1e-5).mean()
    assert same > 0.99  # a value halfway between two codes may fall either way: f32 against f64


def test_with_outputs_it_is_the_same_loop_over_all_entries_row_after_row(monkeypatch):
    monkeypatch.setattr("triptych.compress.gptq.TURNS", 6)
    weight, grid = matrix(0, rows=6, width=32), Grid(bits=4, group_size=16)
    x, g = inputs(1, width=32), inputs(2, width=6)
    alike = [
        (gram.double() / gram.diagonal().mean() + share * torch.eye(len(gram), dtype=torch.float64))
        for gram, share in ((x.T @ x, DAMPING), (g.T @ g, OUTPUTS_DAMPING))
    ]
    order, columns = (torch.argsort(gram.diagonal(), descending=True) for gram in reversed(alike))
    flat = torch.kron(alike[1][order][:, order].contiguous(), alike[0][columns][:, columns].contiguous())
    inverse, left, back = torch.linalg.inv(flat), weight[order][:, columns].double(), torch.empty(6, 32)
    importance = 1 / torch.linalg.inv(alike[0]).diagonal().float()
    for place in range(6 * 32):
        row, column = divmod(place, 32)
        if column == 0:
            aim = left[row : row + 1, columns.argsort()].float()
            steps = find_steps(grouped(aim, grid), grid, importance=importance)
        group = int(columns[column]) // 16
        own = type(steps)(scale=steps.scale[:, group], zero=steps.zero[:, group])
        back[row, column] = decode(encode(left[row, column].float()[None, None], own, grid), own)
        lost = (left[row, column] - back[row, column]) / inverse[place, place]
        left -= (lost * inverse[place]).reshape(6, 32)
        inverse -= torch.outer(inverse[:, place], inverse[place]) / inverse[place, place]
        inverse[place, place] = 1.0  # done with

    ours = dequantize(gptq(weight, factored(x.T @ x), grid, g.T @ g, rounds=0))

    assert np.isclose(ours[order][:, columns], back.numpy(), atol=1e-5).mean() > 0.99


def plain_columns(groups, inputs, steps, grid):
    """`_by_columns` in torch alone."""
    (rows, _, size), order, upper = groups.shape, inputs.order, inputs.upper
    left = groups.reshape(rows, -1)[:, order]
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], BLOCK):
        stop = min(start + BLOCK, left.shape[1])
        errors = torch.empty(rows, stop - start)
        for column in range(start, stop):
            own, at = column_steps(steps, int(order[column]) // size), slice(column, column + 1)
            codes[:, at] = encode(left[:, at], own, grid)
            lost = (left[:, at] - decode(codes[:, at], own)) / upper[column, column]
            left[:, column:stop] -= lost * upper[column, column:stop]
            errors[:, column - start] = lost[:, 0]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes[:, order.argsort()].reshape(groups.shape)


def plain_descent(groups, hessian, steps, grid, codes):
    """`_descend` in torch alone."""
    rows, _, size = groups.shape
    back = decode(codes, steps).reshape(rows, -1)
    slope = (groups.reshape(rows, -1) - back) @ hessian
    codes = codes.reshape(rows, -1).clone()
    for start in range(0, codes.shape[1], BLOCK):
        stop = min(start + BLOCK, codes.shape[1])
        moved = torch.zeros(rows, stop - start)
        for column in range(start, stop):
            own, at = column_steps(steps, column // size), slice(column, column + 1)
            codes[:, at] = encode(back[:, at] + slope[:, at] / hessian[column, column], own, grid)
            delta = decode(codes[:, at], own) - back[:, at]
            moved[:, column - start] = delta[:, 0]
            slope[:, start:stop] -= delta * hessian[column, start:stop]
        slope[:, stop:] -= moved @ hessian[start:stop, stop:]
    return codes.reshape(groups.shape)


def column_steps(steps, group):
    return Steps(scale=steps.scale[:, group], zero=steps.zero[:, group])


@pytest.mark.parametrize("has_outputs", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (3, 48), (8, None)])
def test_the_loops_are_their_plain_forms_to_the_bit(monkeypatch, bits, group_size, symmetric, has_outputs):
    weight, x, g = matrix(0, rows=20, width=144), inputs(1, width=144), inputs(2, width=20)
    weight[3, :48] = 1e-42  # what is next to nothing has a scale to match
    grid = Grid(bits=bits, group_size=group_size, symmetric=symmetric, scale_type="float32")
    asked = (weight, factored(x.T @ x), grid, g.T @ g if has_outputs else None)

    ours = gptq(*asked)
    monkeypatch.setattr("triptych.compress.gptq._by_columns", plain_columns)
    monkeypatch.setattr("triptych.compress.gptq._descend", plain_descent)
    plain = gptq(*asked)

    np.testing.assert_array_equal(ours.codes, plain.codes)
    np.testing.assert_array_equal(ours.scales, plain.scales)


def test_what_outputs_feel_is_less_where_their_curvature_is_known():
    weight, x, g, grid = matrix(0, rows=128), inputs(1), inputs(2, tokens=2000, width=128), Grid(bits=4, group_size=32)

    def felt(held) -> float:
        lost = torch.from_numpy(dequantize(held)) - weight
        return float((((x @ lost.T) @ (g.T @ g)) * (x @ lost.T)).sum())

    alone, together = (gptq(weight, factored(x.T @ x), grid, outputs) for outputs in (None, g.T @ g))

    assert felt(together) < 0.8 * felt(alone)


def test_outputs_that_are_felt_in_blocks_are_each_block_by_itself_and_one_never_felt_is_plain():
    weight, x, grid = matrix(0, rows=20), inputs(1), Grid(bits=4, group_size=32)
    g, met = inputs(2, tokens=200, width=20), factored(x.T @ x)
    whole, felt = g.T @ g, torch.zeros(20, 8)
    felt[:8], felt[16:, :4] = whole[:8, :8], whole[16:, 16:]

    together = gptq(weight, met, grid, felt)

    alone = [gptq(weight[:8], met, grid, felt[:8]), gptq(weight[8:16], met, grid)]
    alone.append(gptq(weight[16:], met, grid, felt[16:, :4]))
    for kind in ("codes", "scales"):
        np.testing.assert_array_equal(getattr(together, kind), np.concatenate([getattr(own, kind) for own in alone]))
    shares = [float(felt[:8].trace()), float(felt[16:].trace())]
    parts = [made_good(felt[:8]), made_good(felt[16:, :4])]
    assert made_good(felt) == pytest.approx(np.average(parts, weights=shares))
    assert made_good(torch.zeros(20, 8)) == 1


def test_each_step_lowers_the_error():
    weight, x, grid = matrix(0), inputs(1), Grid(bits=4, group_size=32)
    gram = x.T @ x
    met = factored(gram, damping=0.01)

    def lost(held) -> float:
        change = weight - torch.from_numpy(dequantize(held))
        return float(((change @ gram) * change).sum())

    nearest, plain = lost(round_weight(weight, grid)), lost(gptq(weight, met, grid, rounds=0))
    polished = lost(gptq(weight, met, grid))

    assert polished < 0.97 * plain
    assert plain < 0.6 * nearest


def test_inputs_that_do_not_hang_together_leave_rounding_to_nearest():
    weight, grid = matrix(0), Grid(bits=4, group_size=32)

    held = gptq(weight, factored(torch.eye(64)), grid, rounds=0)

    np.testing.assert_array_equal(held.codes, round_weight(weight, grid).codes)


def test_a_channel_that_no_token_used_does_not_matter_and_does_no_harm():
    weight, x, grid = matrix(0), inputs(1), Grid(bits=4, group_size=32)
    x[:, 5] = 0

    held = gptq(weight, factored(x.T @ x), grid)

    assert np.isfinite(dequantize(held)).all()
    assert abs(dequantize(held)[:, 5] - weight[:, 5].numpy()).max() < 1.0


@pytest.mark.parametrize("gram", [torch.zeros(64, 64), torch.full((64, 64), torch.nan), torch.eye(32)])
def test_a_gram_that_is_none_is_refused(gram):
    with pytest.raises(CheckpointError, match="gram"):
        gptq(matrix(0), factored(gram), Grid(bits=4, group_size=32))
