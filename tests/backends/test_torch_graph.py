"""A part runs in torch as it runs in OpenVINO; gradients flow; hooks see and replace.

The tolerance was measured over every graph below, whose values reach 27: the worst difference was 4e-5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset13 as op
from tests.compile.test_mini import PROJECTOR, SHIPPED, VISION, pixels, projector_weight

from checkpoints import make
from numpy_decoder import random_weights, spec_of
from triptych.backends.torch_graph import Hooks, TorchPart
from triptych.compile import conv, decoder, parts, softwords
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compile.graph import Store
from triptych.core.spec import RopeSpec
from triptych.errors import BackendError

TOLERANCE = 1e-4
NUM_TOKENS = 20
DECODERS = {
    "grouped heads": {},
    "biased": {"qkv_bias": True},
    "normed queries and keys": {"qk_norm": True, "num_kv_heads": 4},
    "tied head": {"tied": True},
    "llama3 rope": {"rope": RopeSpec(theta=5e5, scaling="llama3", factor=8.0, original_positions=64)},
    "sliding window": {"sliding_window": 7},
}


def in_openvino(model: ov.Model, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    found = ov.Core().compile_model(model, "CPU", options)(arrays)
    return {port.get_any_name(): values for port, values in found.items()}


def agree(model: ov.Model, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    expected = in_openvino(model, arrays)
    with torch.no_grad():
        found = TorchPart(model)(arrays)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].numpy(), values, atol=TOLERANCE, rtol=0)
    return expected


def tiny(**changed: object) -> ov.Model:
    spec = spec_of(**changed)
    return decoder.build(spec, random_weights(spec).__getitem__, Store("fp32"))


def prompt(hidden: int = 64) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).standard_normal((NUM_TOKENS, hidden)).astype(np.float32)
    return {"embeddings": x, "position_ids": 3 + np.arange(NUM_TOKENS), "sampled": np.array([19, 4, 4])}


@pytest.mark.parametrize("changed", DECODERS.values(), ids=DECODERS.keys())
def test_a_decoder_runs_as_in_openvino(changed):
    agree(tiny(**changed), prompt())


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["smolvlm", "llava", "llava-qwen2", "llava-next"])
def test_towers_and_projectors_run_as_in_openvino(kind, tmp_path_factory):
    checkpoint = Checkpoint.open(make(kind, tmp_path_factory.getbasetemp(), 0))
    family = family_of(checkpoint)
    spec = family.read_spec(checkpoint)
    weights = family.weights(checkpoint, spec)
    side = spec.vision.image_size
    tiles = np.random.default_rng(2).integers(0, 256, (2, side, side, 3), dtype=np.uint8)

    features = agree(parts.build("vision", spec, weights, Store("fp32")), {"pixels": tiles})
    agree(parts.build("projector", spec, weights, Store("fp32")), features)


def test_the_demos_tower_and_projector_run_as_in_openvino():
    from safetensors.numpy import load_file

    panel = load_file(SHIPPED / "vision.safetensors")
    features = agree(conv.build(VISION, panel.__getitem__, Store("fp32")), {"pixels": pixels()})
    agree(softwords.build(PROJECTOR, VISION, projector_weight, Store("fp32")), features)


def test_a_saved_part_is_the_same_part(tmp_path: Path):
    model = tiny()
    ov.save_model(model, tmp_path / "decoder.xml", compress_to_fp16=False)

    opened, kept = TorchPart.open(tmp_path / "decoder.xml"), TorchPart(model)

    assert opened.weights.keys() == kept.weights.keys()
    assert torch.equal(opened(prompt())["logits"], kept(prompt())["logits"])


def test_gradients_are_the_slopes_of_the_loss():
    part, arrays = TorchPart(tiny(num_layers=1)), prompt()
    name = "layers.0.self_attn.k_proj"
    exact = part.weights[name].clone()
    part.weights[name] = exact.clone().requires_grad_()
    part(arrays)["logits"].square().sum().backward()
    gradient = part.weights[name].grad

    direction = gradient / gradient.norm()
    losses = []
    for step in (-3e-3, 3e-3):
        part.weights[name] = exact + step * direction
        losses.append(part(arrays)["logits"].double().square().sum().item())

    assert (losses[1] - losses[0]) / 6e-3 == pytest.approx(gradient.norm().item(), rel=0.02)


def test_a_replaced_weight_is_used():
    part = TorchPart(tiny())
    part.weights["lm_head"] = torch.zeros_like(part.weights["lm_head"])

    assert not part(prompt())["logits"].any()


def test_hooks_see_each_weights_input_and_may_replace_it():
    part, seen = TorchPart(tiny()), {}

    def record(name, x):
        seen[name] = x
        return torch.zeros_like(x) if name == "lm_head" else x

    logits = part(prompt(), Hooks(on_input=record))["logits"]

    assert seen.keys() == {name for name, weight in part.weights.items() if weight.ndim == 2}
    assert seen["layers.1.mlp.down_proj"].shape == (3, 96)  # the last layer goes on with sampled rows alone
    assert torch.equal(seen["layers.0.mlp.gate_proj"], seen["layers.0.mlp.up_proj"])
    assert not logits.any()


def test_hooks_see_named_values_and_may_replace_them():
    part, names = TorchPart(tiny()), []

    def cut(name, value):
        names.append(name)
        return torch.zeros_like(value) if name == "layers.0.residual" else value

    changed = part(prompt(), Hooks(on_value=cut))["logits"]

    roles = ("query", "key", "value", "mixed", "residual")
    assert sorted(names) == sorted([f"layers.{i}.{role}" for i in range(2) for role in roles] + ["logits"])
    assert not torch.equal(changed, part(prompt())["logits"])


def test_hooks_see_queries_keys_and_values_before_the_softmax():
    part, arrays, seen, values = TorchPart(tiny()), prompt(), {}, {}

    def record(name, value):
        values[name] = value
        return value

    look = Hooks(on_attention=lambda name, *heads: seen.update({name: heads}), on_value=record)
    part(arrays, look)

    assert seen.keys() == {"layers.0.mixed", "layers.1.mixed"}
    query, key, value = seen["layers.1.mixed"]
    assert query.shape == key.shape == value.shape == (1, 4, NUM_TOKENS, 16)
    scores = (query @ key.mT) / 4
    later = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    mixed = torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ value
    torch.testing.assert_close(mixed[0].transpose(0, 1).flatten(1), values["layers.1.mixed"], atol=1e-5, rtol=0)


def test_an_unknown_operation_and_wrong_inputs_are_named():
    x = op.parameter([2], ov.Type.f32, name="x")
    x.output(0).set_names({"x"})

    with pytest.raises(BackendError, match="Cosh"):
        TorchPart(ov.Model([op.result(op.cosh(x))], [x], "odd"))
    with pytest.raises(BackendError, match=r"inputs are \['embeddings', 'position_ids', 'sampled'\], got \['x'\]"):
        TorchPart(tiny())({"x": np.zeros(2)})
