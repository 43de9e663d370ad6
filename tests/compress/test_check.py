"""Planted faults: a folder whose numbers are not what was asked for is refused, part and weight named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressed import Compressed, compress, edited
from triptych.compile.checkpoint import Checkpoint
from triptych.compress.check import check_folder, wanted
from triptych.compress.recipe import Recipe, RecipeStep, resolve
from triptych.compress.rounding import Grid, round_weight
from triptych.core.quantized import Quantized
from triptych.errors import CheckpointError, GateError

DOWN = "model.text_model.layers.1.mlp.down_proj"
FC1 = "model.vision_model.encoder.layers.0.mlp.fc1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compressed, Path]:
    compressed = compress("smolvlm", tmp_path_factory.getbasetemp())
    return compressed, compressed.write(tmp_path_factory.mktemp("out") / "smolvlm")


@pytest.fixture
def copied(whole: tuple[Compressed, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[1], tmp_path / "copy"))


def with_changed(compressed: Compressed, part: str, edit: Callable[[Quantized], Any]) -> Compressed:
    own = {name: edit(held) for name, held in compressed.changes[part].items()}
    return replace(compressed, changes={**compressed.changes, part: own})


def permuted(held: Quantized) -> Quantized:
    """Every row has its neighbour's scales."""
    return replace(held, scales=np.roll(held.scales, 1, axis=0))


def test_a_whole_folder_passes(whole: tuple[Compressed, Path]) -> None:
    compressed, folder = whole
    compressed.check(folder)


@pytest.mark.parametrize(("part", "first"), [("decoder", "layers.0"), ("projector", "proj"), ("vision", "embeddings")])
def test_scales_of_one_part_permuted_before_they_are_written(
    part: str, first: str, whole: tuple[Compressed, Path], tmp_path: Path
) -> None:
    compressed = with_changed(whole[0], part, permuted)
    folder = compressed.write(tmp_path / "out")

    with pytest.raises(GateError, match=rf"{part}: .*{first}.*(scales are|dB from its source)"):
        compressed.check(folder)


def test_scales_permuted_in_the_file(whole: tuple[Compressed, Path], copied: Path) -> None:
    def permute(tensors: dict[str, Any]) -> None:
        tensors[f"{DOWN}.weight_scale"] = tensors[f"{DOWN}.weight_scale"].roll(1, 0).contiguous()

    edited(copied, permute)

    with pytest.raises(GateError, match=f"decoder: {DOWN}.weight"):
        whole[0].check(copied)


def test_one_code_that_differs(whole: tuple[Compressed, Path], copied: Path) -> None:
    def flip(tensors: dict[str, Any]) -> None:
        tensors[f"{DOWN}.weight_packed"][0, 0] ^= 1

    edited(copied, flip)

    with pytest.raises(GateError, match=f"decoder: {DOWN}.weight does not read as it was written"):
        whole[0].check(copied)


def test_an_inputs_scale_that_differs(whole: tuple[Compressed, Path], copied: Path) -> None:
    def grow(tensors: dict[str, Any]) -> None:
        tensors[f"{FC1}.input_scale"] = 2 * tensors[f"{FC1}.input_scale"]

    edited(copied, grow)

    with pytest.raises(GateError, match=f"vision: {FC1}.weight does not read as it was written"):
        whole[0].check(copied)


def test_an_inputs_scale_is_rounded_as_the_writer_does_it(whole: tuple[Compressed, Path], tmp_path: Path) -> None:
    uneven = with_changed(whole[0], "vision", lambda held: replace(held, input_scale=1 / 3))
    uneven.check(uneven.write(tmp_path / "out"))


def test_a_part_left_unquantized(whole: tuple[Compressed, Path], tmp_path: Path) -> None:
    compressed = whole[0]
    left = replace(compressed, changes={**compressed.changes, "projector": {}})
    folder = left.write(tmp_path / "out")

    with pytest.raises(GateError, match=r"projector: model.connector.*proj.weight is left in float32, .* 3 bits"):
        check_folder(folder, compressed.source, left.changes, compressed.asked)


def test_a_wrong_group_size(whole: tuple[Compressed, Path], tmp_path: Path) -> None:
    compressed = whole[0]

    def coarser(held: Quantized) -> Quantized:
        true = torch.from_numpy(held.codes.reshape(len(held.codes), -1).astype(np.float32) - 8)
        return round_weight(true, Grid(bits=4, group_size=32, scale_type="float32"))

    wrong = with_changed(compressed, "decoder", coarser)
    folder = wrong.write(tmp_path / "out")

    with pytest.raises(
        GateError, match=r"decoder: .* is in 4 bits, groups of 32, the recipe says . bits, groups of 16"
    ):
        check_folder(folder, compressed.source, wrong.changes, compressed.asked)


def test_compile_refuses_a_wrong_group_size_in_the_config(copied: Path) -> None:
    told = json.loads((copied / "config.json").read_text())
    for group in told["quantization_config"]["config_groups"].values():
        if group["weights"]["num_bits"] == 4:
            group["weights"]["group_size"] = 32
    (copied / "config.json").write_text(json.dumps(told))

    with pytest.raises(CheckpointError, match=r"weight_scale has shape \(\d+, \d\), groups of 32 need"):
        Checkpoint.open(copied).held(f"{DOWN}.weight")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [16, 64, None])
def test_rounding_never_looks_like_a_fault_and_permuted_scales_always_do(
    bits: int, size: int | None, whole: tuple[Compressed, Path], tmp_path: Path
) -> None:
    """On weights whose channels differ as trained ones' do, and on all alike, at every width that a recipe may ask."""
    from triptych.compress.check import Wanted, _check_source
    from triptych.core.stored import scheme_of

    rng = np.random.default_rng(0)
    columns, rows = np.linspace(0.5, 2, 128, dtype=np.float32), np.linspace(2, 0.5, 64, dtype=np.float32)[:, None]
    for spread in (0.0, 0.5):
        true = rng.standard_normal((64, 128)) * np.exp(spread * rng.standard_normal((64, 1)))
        held = round_weight(torch.from_numpy(true.astype(np.float32)), Grid(bits=bits, group_size=size))
        wish = Wanted(schemes=frozenset({scheme_of(held)}))

        _check_source("decoder: m", held, true, wish)
        folded = replace(wish, factors=(columns, rows))
        _check_source("decoder: m", held, true / columns / rows, folded)
        if bits > 2 or spread:
            with pytest.raises(GateError, match="decoder: m"):
                _check_source("decoder: m", permuted(held), true, wish)
            with pytest.raises(GateError, match="decoder: m"):
                _check_source("decoder: m", permuted(held), true / columns / rows, folded)


def test_what_is_asked_comes_from_the_recipes_steps() -> None:
    recipe = Recipe(
        name="r",
        steps=(
            RecipeStep(part="decoder", bits=4, group_size=32, scale="awq", train_steps=10),
            RecipeStep(part="embedding", bits=8),
        ),
    )
    shapes = {"decoder": {"layers.0.up": (8, 64)}, "embedding": {"embed_tokens": (10, 64)}}
    names = {"decoder": {"layers.0.up.weight": "model.up.weight"}, "embedding": {"embed_tokens.weight": "emb.weight"}}
    factors = {"decoder": {"layers.0.up": [torch.full((64,), 2.0), torch.full((8, 1), 3.0)]}}

    asked = wanted(resolve(recipe, shapes), names, factors)

    (up,) = asked["decoder"]["model.up.weight"].schemes
    assert (up.bits, up.group_size, up.is_static) == (4, 32, False)
    assert [factor.shape for factor in asked["decoder"]["model.up.weight"].factors] == [(64,), (8, 1)]
    assert 0 < asked["decoder"]["model.up.weight"].growth < 0.01
    assert (asked["embedding"]["emb.weight"].factors, asked["embedding"]["emb.weight"].growth) == ((), 0.0)
