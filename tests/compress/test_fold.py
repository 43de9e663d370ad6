"""What folding multiplies each tensor by is told, and what rounding left is held against that."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from tests.compress.test_run import job
from tests.compress.tiny import model

from triptych.compress.check import _check_source, wanted
from triptych.compress.fold import fold, folds
from triptych.compress.recipe import RecipeStep, resolve
from triptych.compress.run import compress
from triptych.core.quantized import Quantized


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_every_tensor_is_multiplied_by_what_is_told(kind: torch.dtype) -> None:
    exact = model(num_kv_heads=4).parts["decoder"].weights
    tensors, factors = dict(exact), dict[str, list[torch.Tensor]]()

    for pair in folds(tensors, tensors):
        scales = torch.rand(tensors[pair.readers[0]].shape[1], generator=torch.Generator().manual_seed(0)) + 0.5
        for name, factor in fold(tensors, pair, scales, kind).items():
            factors.setdefault(name, []).append(factor)

    assert [len(factors[f"layers.0.self_attn.{name}_proj"]) for name in "qvo"] == [1, 2, 1]
    for name in tensors:
        torch.testing.assert_close(prod(factors.get(name, []), start=exact[name]), tensors[name])


@pytest.mark.parametrize("scale", ["smooth", "awq"])
def test_a_scaled_weight_is_near_its_source_times_what_was_folded_into_it(scale: str, tmp_path: Path) -> None:
    step = RecipeStep(part="decoder", bits=8, scale=scale)  # type: ignore[arg-type]
    asked = job(model(num_kv_heads=4), tmp_path, step)
    made = compress(asked)
    shapes = {part: {name.removesuffix(".weight"): own[name] for name in own} for part, own in asked.shapes.items()}
    steps = resolve(asked.recipe, shapes)

    wishes = wanted(steps, {"decoder": {name: name for name in asked.shapes["decoder"]}}, made.factors)["decoder"]

    assert len(wishes["layers.0.mlp.up_proj.weight"].factors) == 2
    for name, wish in wishes.items():
        held = made.changed["decoder"][name]
        assert isinstance(held, Quantized)
        _check_source(name, held, asked.model.exact("decoder")[name.removesuffix(".weight")].numpy(), wish)
