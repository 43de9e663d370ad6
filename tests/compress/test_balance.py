"""Sensitivity by modality: the gradients that a plain finite difference finds, and MBQ's floor."""

import numpy as np
import pytest
import torch

from numpy_decoder import random_weights, spec_of
from triptych.backends.torch_graph import Hooks, TorchPart
from triptych.compile import decoder
from triptych.compile.graph import Store
from triptych.compress.balance import block_end, sensitivities, token_weights
from triptych.compress.samples import Sample
from triptych.core.spec import Modality

TEXT, IMAGE, AUDIO = Modality.TEXT, Modality.IMAGE, Modality.AUDIO
SPEC = spec_of()


def part() -> TorchPart:
    return TorchPart(decoder.build(SPEC, random_weights(SPEC).__getitem__, Store("fp32")))


def logits_of(model: TorchPart):
    def logits(sample: Sample, sampled, hooks: Hooks) -> torch.Tensor:
        arrays = {
            "embeddings": sample.embeddings,
            "position_ids": np.arange(sample.num_tokens, dtype=np.int64),
            "sampled": sampled,
        }
        return model(arrays, hooks)["logits"]

    return logits


def sample(*kinds: Modality, answer: int = 3, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    modality = np.array([*kinds, *[TEXT] * answer], np.uint8)
    count = len(modality)
    return Sample(
        name="one",
        token_ids=rng.integers(0, SPEC.vocab_size, count).astype(np.int32),
        embeddings=rng.standard_normal((count, SPEC.hidden)).astype(np.float32),
        modality=modality,
        is_answer=np.arange(count) >= count - answer,
        tiles=np.zeros((0, 8, 8, 3), np.uint8),
        rows=np.zeros(0, np.int32),
    )


def test_it_is_what_finite_differences_find():
    model, one = part(), sample(TEXT, IMAGE, IMAGE, AUDIO)
    logits, targets = logits_of(model), torch.from_numpy(one.token_ids[one.judged + 1].astype(np.int64))
    name = "layers.0.self_attn.o_proj"

    felt = sensitivities(logits, [one])[name]

    def loss(token: int, channel: int, by: float) -> float:
        def nudge(weight: str, value: torch.Tensor) -> torch.Tensor:
            if weight == name:
                value = value.clone()
                value.reshape(-1, SPEC.hidden)[token, channel] += by
            return value

        with torch.no_grad():
            found = logits(one, one.judged, Hooks(on_output=nudge))
            return float(torch.nn.functional.cross_entropy(found.double(), targets))

    slopes = [abs(loss(3, channel, 0.05) - loss(3, channel, -0.05)) / 0.1 for channel in range(SPEC.hidden)]
    assert felt[AUDIO] == pytest.approx(np.mean(slopes), rel=0.02)  # f32 logits


def test_every_modality_and_every_block_is_felt():
    felt = sensitivities(logits_of(part()), [sample(IMAGE, IMAGE, TEXT), sample(AUDIO, TEXT, seed=1)])

    assert len(felt) == 2 * SPEC.num_layers
    assert felt["layers.0.mlp.down_proj"].keys() == {TEXT, IMAGE, AUDIO}
    assert felt[f"layers.{SPEC.num_layers - 1}.mlp.down_proj"].keys() == {TEXT}  # only judged rows reach it


def test_ratios_to_text_have_the_median_of_their_kind_as_floor():
    felt = {f"layers.{i}.mlp.down_proj": {TEXT: 2.0, IMAGE: image} for i, image in enumerate((0.2, 0.4, 1.0))}

    weights = token_weights({**felt, "layers.3.mlp.down_proj": {TEXT: 1.0}})

    assert [weights[f"layers.{i}.mlp.down_proj"][IMAGE] for i in range(4)] == [0.2, 0.2, 0.5, 0.2]
    assert all(own[TEXT] == 1.0 for own in weights.values())


def test_a_linear_takes_the_weights_of_its_block():
    assert block_end("layers.3.self_attn.q_proj") == "layers.3.self_attn.o_proj"
    assert block_end("layers.3.mlp.gate_proj") == "layers.3.mlp.down_proj"
