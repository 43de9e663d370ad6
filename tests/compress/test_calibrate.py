"""Calibration sees each weight's input, by modality; folded scales change no product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.compress.tiny import model, sample, seeing

from triptych.backends.torch_graph import Hooks
from triptych.compress.calibrate import Seen, calibrate
from triptych.compress.fold import fold, folds
from triptych.compress.model import Model, fake_quantized
from triptych.core.spec import Modality

UP, DOWN, LAST = "layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "layers.1.mlp.down_proj"


def mixed(seed: int):
    """A sample whose first five tokens are said to be a picture's."""
    one = sample(seed)
    modality = np.where(np.arange(one.num_tokens) < 5, Modality.IMAGE, Modality.TEXT).astype(np.uint8)
    return replace(one, modality=modality)


def inputs(made: Model, samples, name: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    look = Hooks(on_input=lambda own, x: (found.append(x) if own == name else None, x)[1])
    with torch.no_grad():
        for one in samples:
            table = torch.from_numpy(made._table(one.token_ids))
            made.decode(table, np.arange(one.num_tokens), {"decoder": look})
    return found


class Blind(Model):
    """What embeds tokens of every modality by the table: there are no towers here."""

    def embed(self, one, hooks=None):
        return torch.from_numpy(self._table(one.token_ids))


def blind() -> Model:
    made = model()
    return Blind(made.parts, made._table)


def test_what_is_seen_is_the_sum_over_each_modalitys_tokens():
    made, samples = blind(), [mixed(0), mixed(1)]

    seen = calibrate(made, samples, "decoder", [UP, LAST])[UP]

    whole = torch.cat(inputs(made, samples, UP)).double()
    shows = torch.from_numpy(np.concatenate([one.modality for one in samples]))
    for modality in (Modality.TEXT, Modality.IMAGE):
        rows = whole[shows == int(modality)]
        own = seen.channels[modality]
        assert own.num_tokens == len(rows)
        torch.testing.assert_close(own.gram.double(), rows.T @ rows, atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(own.total.double(), rows.abs().sum(0), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(seen.most[modality].double(), rows.abs().amax(0))


def test_weights_that_share_an_input_share_what_was_seen():
    seen = calibrate(blind(), [mixed(0)], "decoder", [f"layers.0.self_attn.{x}_proj" for x in "qkvo"])

    first, second, third, out = seen.values()
    assert first is second is third is not out


def test_the_last_layer_sees_every_token_not_the_sampled_alone():
    seen = calibrate(blind(), [mixed(0)], "decoder", [LAST])[LAST]

    assert sum(own.num_tokens for own in seen.channels.values()) == 12


def test_the_part_runs_no_further_than_asked():
    made, reached = blind(), []
    plain = made.watched

    def watched(part, look):
        return plain(part, lambda name, x: (reached.append(name), look(name, x))[1])

    made.watched = watched  # type: ignore[method-assign]
    calibrate(made, [mixed(0)], "decoder", [UP])

    assert reached[-1] == UP


def test_a_kernels_input_is_what_lies_under_it():
    tile = np.random.default_rng(0).integers(0, 9, (1, 4, 4, 3), dtype=np.uint8)

    seen = calibrate(seeing(), [replace(sample(), tiles=tile)], "vision", ["stem"])["stem"]

    own, colours = seen.channels[Modality.IMAGE], torch.from_numpy(tile[0].astype(np.float32)).permute(2, 0, 1)
    under = torch.stack([colours[:, y : y + 3, x : x + 3].flatten() for y in range(2) for x in range(2)])
    assert own.num_tokens == 4
    torch.testing.assert_close(own.gram, under.T @ under)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_folded_scales_change_no_product(kind):
    made, samples = model(num_kv_heads=4), [sample(0), sample(1)]
    made.use({})
    with torch.no_grad():
        expected = made.logits(samples[0])
    tensors = dict(made.parts["decoder"].weights)
    names = [name for name, tensor in tensors.items() if tensor.ndim == 2 and name.startswith("layers.")]
    pairs = folds(names, tensors)

    for number, pair in enumerate(pairs):
        width = tensors[pair.readers[0]].shape[1]
        fold(tensors, pair, torch.rand(width, generator=torch.Generator().manual_seed(number)) + 0.5, kind)

    assert len(pairs) == 8  # four a layer: two norms, values into the output, up into down
    made.parts["decoder"].weights = tensors
    with torch.no_grad():
        torch.testing.assert_close(made.logits(samples[0]), expected, atol=1e-4, rtol=0)


def test_grouped_heads_and_half_a_layer_are_not_folded():
    tensors = model().parts["decoder"].weights
    names = [name for name, tensor in tensors.items() if tensor.ndim == 2 and "k_proj" not in name]

    assert {pair.maker.rpartition(".")[2] for pair in folds(names, tensors)} == {"post_attention_layernorm", "up_proj"}


def test_a_rounded_input_has_256_steps_and_one_that_is_positive_has_all_on_its_side():
    both, positive = torch.linspace(-3, 3, 1001), torch.linspace(0, 3, 1001)

    rounded, finer = fake_quantized(both, 3 / 127), fake_quantized(positive, 3 / 127)

    assert len(rounded.unique()) == 255
    assert (rounded - both).abs().max() <= 3 / 127 / 2 + 1e-6
    assert len(finer.unique()) == 256
    assert (finer - positive).abs().max() <= 3 / 255 / 2 + 1e-6


def test_a_static_step_errs_no_more_than_the_whole_range_would():
    rows = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0)) ** 3
    seen = Seen()
    seen.add(Modality.IMAGE, rows, has_gram=False)

    def error(step: float) -> float:
        return float((fake_quantized(rows, step) - rows).square().sum())

    whole = float(rows.abs().max()) / 127
    assert seen.step() <= whole
    assert error(seen.step()) <= error(whole)
    assert seen.mean == pytest.approx(float(rows.mean()), abs=1e-6)


def test_ranges_of_all_modalities_count():
    seen = Seen(
        rows=[torch.zeros(1, 2)],
        most={Modality.TEXT: torch.tensor([1.0, 2.0]), Modality.IMAGE: torch.tensor([3.0, 0.5])},
    )

    assert seen.range.tolist() == [3.0, 2.0]
