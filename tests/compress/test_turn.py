"""In turn: every input is that which rounded weights before it leave, and is computed once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from tests.compress.test_calibrate import blind, inputs, mixed
from tests.compress.tiny import model, sample

from triptych.compress.gptq import DAMPING, factored
from triptych.compress.model import Model
from triptych.compress.rounding import Grid, round_weight
from triptych.compress.turn import Met, take_turns, tempered
from triptych.core.quantized import Quantized
from triptych.core.spec import Modality

GRID = Grid(bits=3, group_size=16)


def linears(made: Model) -> list[str]:
    return [name for name, weight in made.exact("decoder").items() if weight.ndim == 2]


def rounded(made: Model, name: str) -> Quantized:
    return round_weight(made.exact("decoder")[name], GRID)


def plainly(met: list[torch.Tensor]) -> torch.Tensor:
    return sum((x * tempered(x)).T @ x for x in met)  # type: ignore[return-value]


def test_each_input_is_what_a_pass_from_the_start_with_all_before_it_rounded_gives():
    made, again, samples = blind(), blind(), [mixed(0), mixed(1)]
    done: dict[str, Quantized] = {}
    made.use({})

    def meet(name: str, met: Met) -> None:
        again.use({"decoder": {f"{name}.weight": held for name, held in done.items()}})
        torch.testing.assert_close(met.gram({}), plainly(inputs(again, samples, name)), atol=1e-4, rtol=1e-4)
        done[name] = rounded(made, name)
        made.put("decoder", {f"{name}.weight": done[name]})

    take_turns(made, samples, "decoder", linears(made), meet)

    assert list(done) == [name for name in made.parts["decoder"].weights if name in done]
    assert set(done) == set(linears(made))


def test_the_part_runs_no_further_than_the_last_weight_that_is_asked_for():
    made, reached = model(), []
    plain = made.runs

    def counted(part, one):
        for run in plain(part, one):
            yield (reached.append(halt[0]) or halt for halt in run)

    made.runs = lambda part, one: (Sending(run) for run in counted(part, one))  # type: ignore[method-assign]
    take_turns(made, [sample()], "decoder", ["layers.0.self_attn.v_proj"], lambda name, met: None)

    assert reached[-1] == "layers.0.self_attn.v_proj"


class Sending:
    """A generator that is sent nothing but None."""

    def __init__(self, run) -> None:
        self._run = run

    def send(self, value: object) -> object:
        assert value is None
        return next(self._run)


def test_an_input_that_gets_a_static_step_is_rounded_from_there_on():
    made, twin, name, later = model(), model(), "layers.0.self_attn.o_proj", "layers.0.mlp.up_proj"
    held = replace(rounded(made, name), input_scale=0.05)
    seen: list[torch.Tensor] = []

    def meet(at: str, met: Met) -> float | None:
        if at == later:
            seen.append(met.gram({}))
            return None
        made.put("decoder", {f"{name}.weight": held})
        return held.input_scale

    take_turns(made, [sample()], "decoder", [name, later], meet)
    twin.use({"decoder": {f"{name}.weight": held}})

    torch.testing.assert_close(seen[0], plainly(inputs_of(twin, later)), atol=1e-4, rtol=1e-4)
    twin.use({"decoder": {f"{name}.weight": replace(held, input_scale=None)}})
    assert not torch.allclose(seen[0], plainly(inputs_of(twin, later)), atol=1e-4)


def inputs_of(made: Model, name: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    look = made.watched("decoder", lambda own, x: (found.append(x) if own == name else None, x)[1])
    with torch.no_grad():
        made.decode(made.embed(sample()), np.arange(sample().num_tokens), look)
    return found


def test_a_token_far_longer_than_the_others_counts_by_its_direction_alone():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    x[0] *= 1000

    share = float((x[0] * tempered(x)[0]) @ x[0]) / float(((x * tempered(x)) * x).sum())

    assert share < 0.05
    assert float(x[0] @ x[0]) / float(x.square().sum()) > 0.99


def test_tokens_weigh_by_their_modality():
    x, kinds = torch.randn(6, 4), np.array([0, 0, 0, 1, 1, 1], np.uint8)
    met = Met([x], [kinds])
    heavy = tempered(x)

    alike, weighed = met.gram({}), met.gram({Modality.IMAGE: 3.0})

    torch.testing.assert_close(alike, (x * heavy).T @ x)
    torch.testing.assert_close(weighed, alike + 2 * ((x * heavy)[3:].T @ x[3:]))


def test_a_gram_is_factored_once_for_all_who_meet_it_and_damped_less_by_many_tokens():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    few, many = Met([x], [None]), Met(256 * [x], 256 * [None])

    assert few.factored({}) is few.factored({})
    torch.testing.assert_close(few.factored({}).hessian, factored(few.gram({})).hessian)
    torch.testing.assert_close(many.factored({}).hessian, factored(many.gram({}), DAMPING / 2).hessian)
