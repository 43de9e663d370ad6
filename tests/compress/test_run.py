"""A recipe's steps: each finds in place what those before it left, and goes on where it was broken off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.compress.test_calibrate import blind, inputs, mixed
from tests.compress.test_turn import plainly
from tests.compress.tiny import model, sample, seeing

from triptych.compress import run
from triptych.compress.gptq import Factored, factored
from triptych.compress.model import Model
from triptych.compress.recipe import Recipe, RecipeStep
from triptych.compress.run import Job, compress
from triptych.core.quantized import Quantized
from triptych.errors import ConfigError

SAMPLES = [sample(0), sample(1)]


def job(made: Model, work: Path, *steps: RecipeStep) -> Job:
    named = {name if name.endswith(".bias") else f"{name}.weight": held for name, held in made.exact("decoder").items()}
    shapes = {full: tuple(held.shape) for full, held in named.items()}
    return Job(
        model=made, recipe=Recipe(name="mine", steps=steps), shapes={"decoder": shapes}, samples=SAMPLES, kind="fp32",
        small_kinds={"decoder": "fp32"}, work=work, seed="tiny",
    )  # fmt: skip


def test_a_later_step_of_a_part_meets_what_an_earlier_one_rounded(tmp_path, monkeypatch):
    first = RecipeStep(part="decoder", weights=("layers.0",), bits=3, group_size=16)
    later = RecipeStep(part="decoder", weights=("layers.1",), bits=4, group_size=16, round="gptq")
    met: list[Factored] = []
    plain = run.gptq
    monkeypatch.setattr(run, "gptq", lambda weight, gram, *asked: (met.append(gram), plain(weight, gram, *asked))[1])

    made = compress(job(model(), tmp_path, first, later)).changed["decoder"]

    twin = model()
    twin.use({"decoder": {name: held for name, held in made.items() if name.startswith("layers.0.")}})
    expected = plainly(inputs(twin, SAMPLES, "layers.1.self_attn.q_proj"))
    torch.testing.assert_close(met[0].hessian, factored(expected).hessian, atol=1e-4, rtol=1e-4)


def test_work_that_was_broken_off_in_a_layer_goes_on_after_the_last_whole_one(tmp_path, monkeypatch):
    step = RecipeStep(part="decoder", widths=(4, 8), most_bits=6.5, group_size=16, scale="awq", round="gptq")
    whole = compress(job(model(), tmp_path / "whole", step)).changed["decoder"]
    plain, calls = run.gptq, []

    def breaks(*asked: Any) -> Quantized:
        calls.append(asked)
        if len(calls) == 10:  # three weights into the second layer
            raise KeyboardInterrupt
        return plain(*asked)

    monkeypatch.setattr(run, "gptq", breaks)
    with pytest.raises(KeyboardInterrupt):
        compress(job(model(), tmp_path / "broken", step))
    again = compress(job(model(), tmp_path / "broken", step)).changed["decoder"]

    assert len(calls) == 10 + 7
    assert again.keys() == whole.keys()
    assert {held.bits for held in whole.values() if isinstance(held, Quantized)} == {4, 8}
    for name, held in whole.items():
        for kind in ("codes", "scales") if isinstance(held, Quantized) else ():
            torch.testing.assert_close(
                torch.from_numpy(getattr(held, kind)), torch.from_numpy(getattr(again[name], kind)), atol=0, rtol=0
            )


def test_widths_elsewhere_than_in_the_decoder_are_refused():
    with pytest.raises(ConfigError, match="step for vision: widths are chosen in the decoder alone"):
        RecipeStep(part="vision", widths=(4, 8), most_bits=5.0)


def test_what_is_kept_is_not_taken_for_other_pictures_or_types(tmp_path):
    step = RecipeStep(part="decoder", bits=3, group_size=16)
    shown = replace(mixed(0), tiles=np.zeros((1, 4, 4, 3), np.uint8))
    first = replace(job(blind(), tmp_path, step), samples=[shown])
    others = [
        replace(first, samples=[replace(shown, tiles=shown.tiles + 1)]),
        replace(first, small_kinds={"decoder": "bf16"}),
    ]

    compress(first)
    kept = set(tmp_path.iterdir())
    compress(first)
    assert set(tmp_path.iterdir()) == kept
    for number, other in enumerate(others, 2):
        compress(other)
        assert len(set(tmp_path.iterdir())) == number * len(kept)


def test_a_tower_is_calibrated_on_its_pictures_however_many_texts_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRAM_TOKENS", 1)
    step = RecipeStep(part="vision", bits=8, activations=8, scale="smooth", round="gptq")
    tiles = np.random.default_rng(0).integers(0, 9, (1, 4, 4, 3), dtype=np.uint8)
    samples = [*(sample(seed, num_tokens=100) for seed in range(40)), replace(mixed(0), tiles=tiles)]
    asked = Job(
        model=seeing(), recipe=Recipe(name="mine", steps=(step,)), shapes={"vision": {"stem.weight": (2, 3, 3, 3)}},
        samples=samples, kind="fp32", small_kinds={"vision": "fp32"}, work=tmp_path, seed="tiny",
    )  # fmt: skip

    stem = compress(asked).changed["vision"]["stem.weight"]

    assert isinstance(stem, Quantized)
    assert stem.input_scale is not None
    assert stem.input_scale * 127 == pytest.approx(tiles.max(), rel=0.7)


def test_weights_of_more_rows_than_a_block_are_felt_too(tmp_path, monkeypatch):
    monkeypatch.setattr("triptych.compress.cost.MOST_ROWS", 40)
    felt, alone = (RecipeStep(part="decoder", bits=3, group_size=16, round=kind) for kind in ("felt", "gptq"))

    made, again, plain = (compress(job(model(), tmp_path, step)) for step in (felt, felt, alone))

    assert not made.remarks
    assert made.changed["decoder"].keys() == plain.changed["decoder"].keys()
    for name, held in made.changed["decoder"].items():
        np.testing.assert_array_equal(held.codes, again.changed["decoder"][name].codes)
        assert not np.array_equal(held.codes, plain.changed["decoder"][name].codes)


def test_progress_is_a_share_though_biases_change_too(tmp_path):
    told: list[float] = []
    step = RecipeStep(part="decoder", bits=4, group_size=16, round="gptq")

    made = compress(replace(job(model(qkv_bias=True), tmp_path, step), progress=lambda what, share: told.append(share)))

    assert sum(name.endswith(".bias") for name in made.changed["decoder"]) == 6
    assert max(told) == 1
    assert sorted(told) == told
