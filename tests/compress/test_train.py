"""Scales and norms trained end to end: less divergence in the same codes, and resumed as if never broken off."""

from __future__ import annotations

import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.compress.test_run import SAMPLES, job
from tests.compress.tiny import model

from triptych.compress import train as training
from triptych.compress.loss import Judge
from triptych.compress.recipe import RecipeStep
from triptych.compress.rounding import Grid, round_weight
from triptych.compress.run import compress
from triptych.compress.train import Course, divergence, lessons, put, train
from triptych.core.quantized import Held, Quantized
from triptych.errors import ConfigError


@pytest.fixture(autouse=True)
def in_small_steps(monkeypatch):
    monkeypatch.setattr(training, "TOKENS", 8)
    monkeypatch.setattr(training, "SAVED", 4)
    monkeypatch.setattr(training, "RATE", 0.02)


def trained(work: Path, steps: int) -> dict[str, Held]:
    step = RecipeStep(part="decoder", bits=3, group_size=16, scale="awq", train_steps=steps)
    return compress(job(model(), work, step)).changed["decoder"]


def test_what_is_trained_says_more_of_what_the_exact_model_says_in_the_same_codes(tmp_path):
    rounded, better = trained(tmp_path, 0), trained(tmp_path, 60)
    judge = Judge(model(), SAMPLES)

    def lost(held: dict[str, Held]) -> float:
        return float(judge.judge({"decoder": held}).divergence.mean())

    assert lost(better) < 0.5 * lost(rounded)
    assert {"norm.weight", "layers.1.post_attention_layernorm.weight"} < better.keys()
    for name, before in rounded.items():
        held = better[name]
        if isinstance(before, Quantized):
            assert isinstance(held, Quantized)
            np.testing.assert_array_equal(held.codes, before.codes)
            assert (held.bits, held.shape, held.scales.dtype) == (before.bits, before.shape, before.scales.dtype)


@pytest.mark.parametrize(("kind", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_what_it_learns_from_is_the_divergence_that_is_judged(monkeypatch, kind, close):
    monkeypatch.setattr(training, "KIND", kind)
    made = model()
    held: dict[str, Held] = {
        f"{name}.weight": round_weight(exact, Grid(bits=3, group_size=16)) if exact.ndim == 2 else exact.numpy()
        for name, exact in made.exact("decoder").items()
    }
    expected = Judge(made, SAMPLES).judge({"decoder": held})
    made.use({})
    taught = lessons(made, SAMPLES)

    put(made, held, dict.fromkeys(held, torch.zeros(())))
    with torch.no_grad():
        found = torch.cat(
            [divergence(made, lesson, ("lm_head", made.exact("embedding")["lm_head"])) for lesson in taught]
        )

    np.testing.assert_allclose(found.numpy(), expected.divergence, rtol=close, atol=close / 10)


def test_what_training_gives_is_what_it_put_in_place_last_in_the_types_that_are_stored(tmp_path, monkeypatch):
    made, grid, puts = model(), Grid(bits=3, group_size=16, scale_type="bfloat16"), []
    held: dict[str, Held] = {
        f"{name}.weight": round_weight(exact, grid) if exact.ndim == 2 else exact.numpy().astype(ml_dtypes.bfloat16)
        for name, exact in made.exact("decoder").items()
    }
    plain = training.put
    monkeypatch.setattr(training, "put", lambda *asked: (puts.append(asked), plain(*asked)))
    taught = lessons(made, SAMPLES)
    course = Course(held=held, beside={}, steps=3, path=tmp_path / "course.pt", progress=lambda _: None)

    def lost() -> np.ndarray:
        with torch.no_grad():
            return torch.cat([divergence(made, lesson, head) for lesson in taught]).numpy()

    head = "lm_head", made.exact("embedding")["lm_head"]
    better = train(made, SAMPLES, course)
    plain(*puts[-1])  # its growth is by now that of the last step
    expected = lost()
    plain(made, better, dict.fromkeys(better, torch.zeros(())))

    np.testing.assert_array_equal(lost(), expected)
    for name, before in held.items():
        values = [each.scales if isinstance(each, Quantized) else each for each in (before, better[name])]
        assert values[0].dtype == values[1].dtype == ml_dtypes.bfloat16
        assert (values[0] != values[1]).any()


def test_training_that_was_broken_off_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    whole = trained(tmp_path / "whole", 12)
    plain, calls = training.divergence, []

    def breaks(*asked):
        calls.append(asked)
        if len(calls) == 7 * 2:  # in the seventh step
            raise KeyboardInterrupt
        return plain(*asked)

    monkeypatch.setattr(training, "divergence", breaks)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "broken", 12)
    again = trained(tmp_path / "broken", 12)

    assert len(calls) == 7 * 2 + 8 * 2
    for name, held in whole.items():
        other = again[name]
        values = [(each.scales if isinstance(each, Quantized) else each) for each in (held, other)]
        np.testing.assert_array_equal(*values)


def test_one_samples_backward_pass_is_in_memory_at_a_time(tmp_path, monkeypatch):
    plain, before = training.divergence, []

    def watched(*asked):
        assert all(each() is None for each in before)
        made = plain(*asked)
        before.append(weakref.ref(made))
        return made

    monkeypatch.setattr(training, "divergence", watched)
    trained(tmp_path, 2)
    assert len(before) == 2 * 2


@pytest.mark.parametrize("asked", [{"part": "vision", "bits": 4}, {"part": "decoder"}])
def test_only_a_decoders_weights_of_few_bits_are_trained(asked):
    with pytest.raises(ConfigError, match="only a decoder's weights of few bits are trained"):
        RecipeStep(train_steps=10, **asked)
