"""What rounding is felt to cost, held against what it costs; and widths that follow from it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from tests.compress.test_calibrate import blind, mixed
from tests.compress.tiny import model, sample

from triptych.compress.cost import RoundingCost, feel
from triptych.compress.loss import Judge
from triptych.compress.mixed import widths, within
from triptych.compress.recipe import Recipe, RecipeStep, resolve
from triptych.compress.rounding import Grid, round_weight
from triptych.errors import ConfigError

GRID = Grid(bits=6, group_size=16)


@pytest.fixture(scope="module")
def felt():
    made = model()
    return made, feel(made, texts(), dict.fromkeys(linears(made), GRID), with_outputs=True)


def texts():
    """Every token but the first is judged."""
    return [replace(sample(seed, 48), is_answer=np.arange(48) > 0) for seed in range(8)]


def linears(made) -> list[str]:
    return [name for name, weight in made.exact("decoder").items() if weight.ndim == 2]


def test_what_is_felt_is_what_the_divergence_comes_to(felt):
    made, found = felt
    judge = Judge(made, texts())
    measured = {}
    for name in found.costs:
        held = round_weight(made.exact("decoder")[name], GRID, clip=False)
        measured[name] = float(judge.judge({"decoder": {f"{name}.weight": held}}).divergence.mean())
    made.use({})

    ratios = [found.costs[name] / measured[name] for name in measured]

    assert 0.5 < np.median(ratios) < 2
    assert np.corrcoef(np.log(list(found.costs.values())), np.log(list(measured.values())))[0, 1] > 0.7


def test_weights_that_share_an_input_are_one_unit(felt):
    _, found = felt
    first = [tuple(name.removeprefix("layers.0.") for name in unit) for unit in found.units[:4]]

    assert first == [
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.o_proj",),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.down_proj",),
    ]


def test_how_a_products_gradients_hang_together_is_kept(felt):
    made, found = felt
    name = "layers.1.mlp.up_proj"
    rows = len(made.exact("decoder")[name])

    assert found.outputs.keys() == found.costs.keys()
    assert found.outputs[name].shape == (rows, rows)
    assert torch.linalg.eigvalsh(found.outputs[name]).min() > -1e-6 * found.outputs[name].trace()
    assert np.linalg.matrix_rank(found.outputs[name].numpy()) > rows / 2


def test_of_a_weight_of_many_rows_blocks_of_them_are_kept_as_even_as_can_be(felt, monkeypatch):
    made, found = felt
    monkeypatch.setattr("triptych.compress.cost.MOST_ROWS", 40)

    again = feel(made, texts(), dict.fromkeys(linears(made), GRID), with_outputs=True).outputs

    up, q = "layers.1.mlp.up_proj", "layers.0.self_attn.q_proj"  # of 96 and 64 rows
    assert (again[up].shape, again[q].shape) == ((96, 32), (64, 32))
    for start in (0, 32, 64):
        own = slice(start, start + 32)
        torch.testing.assert_close(again[up][own], found.outputs[up][own, own], rtol=1e-4, atol=1e-9)


def test_what_rounding_takes_is_the_same_where_memory_keeps_none_of_it(felt, monkeypatch):
    made, found = felt
    monkeypatch.setattr("triptych.compress.cost.LOST_BYTES", 0)

    assert feel(made, texts(), dict.fromkeys(linears(made), GRID)).costs == found.costs


def test_of_many_samples_a_few_are_felt_and_media_keep_their_share(monkeypatch):
    monkeypatch.setattr("triptych.compress.cost.FEW", 6)
    made, seen = blind(), []
    shown, told = [mixed(seed) for seed in range(3)], [sample(seed) for seed in range(6)]
    plain = made.embed
    monkeypatch.setattr(made, "embed", lambda one: (seen.append(one.has_media), plain(one))[1])

    feel(made, shown + told, dict.fromkeys(linears(made), GRID))

    assert sorted(seen) == 4 * [False] + 2 * [True]


def test_more_bits_go_where_more_is_felt_and_a_unit_has_one_width():
    shapes = {name: (64, 64) for name in ("a", "b", "c")}
    step = RecipeStep(part="decoder", widths=(4, 8), most_bits=6.0, group_size=32)
    (found,) = resolve(Recipe(name="mine", steps=(step,)), {"decoder": shapes})

    chosen = widths(RoundingCost(costs={"a": 1.0, "b": 0.1, "c": 3.0}, units=(("a", "b"), ("c",))), shapes, found)

    assert chosen == {"a": 4, "b": 4, "c": 8}


def test_groups_that_fell_back_may_take_more_than_was_asked_for_and_nothing_else_may():
    shapes, felt = {"a": (64, 48)}, RoundingCost(costs={"a": 1.0}, units=(("a",),))
    step = RecipeStep(part="decoder", widths=(4, 8), most_bits=4.6, group_size=64)
    (found,) = resolve(Recipe(name="mine", steps=(step,)), {"decoder": shapes})

    assert found.fallbacks == ("a: width 48 is not a multiple of 64: groups of 16",)
    assert widths(felt, shapes, found) == {"a": 4}
    with pytest.raises(ConfigError, match="the smallest widths take 1,920 bytes, the budget is 1,536"):
        widths(felt, {"a": (64, 48)}, replace(found, fallbacks=(), step=msgspec.structs.replace(step, most_bits=4.0)))


def test_a_budget_of_bytes_under_the_smallest_widths_is_refused_before_any_work():
    own = {"a.weight": (64, 48)}
    recipe = Recipe(name="mine", steps=(RecipeStep(part="decoder", bits=4, group_size=64),))

    assert within(recipe, {"decoder": own}, 2000).steps[0].widths == (4, 8)
    with pytest.raises(ConfigError, match="the budget is 1,900 bytes, the smallest widths take 1,920"):
        within(recipe, {"decoder": own}, 1900)
