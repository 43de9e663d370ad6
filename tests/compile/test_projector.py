"""Projectors against transformers' own modules."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
import torch

from triptych.compile import projector
from triptych.compile.graph import Store
from triptych.core.spec import ProjectorSpec, VisionSpec
from triptych.errors import CheckpointError

HALF = (0.5, 0.5, 0.5)


def tower(num_tokens: int) -> VisionSpec:
    return VisionSpec(kind="vit", image_size=32, num_tokens=num_tokens, hidden=8, mean=HALF, std=HALF)


def run(spec: ProjectorSpec, vision: VisionSpec, weights: dict[str, np.ndarray], features: np.ndarray):
    model = projector.build(spec, vision, lambda name: weights[name], Store("fp32"))
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    found = compiled({"features": features})
    return {port.get_any_name(): values for port, values in found.items()}


@pytest.mark.parametrize(("side", "shuffle"), [(4, 2), (9, 3), (8, 4), (6, 1)])
def test_pixel_shuffle_is_idefics3s(side: int, shuffle: int):
    from transformers import Idefics3Config
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

    rng = np.random.default_rng(0)
    spec = ProjectorSpec(
        kind="pixel_shuffle", num_tokens=(side // shuffle) ** 2, hidden=12, shuffle=shuffle, bias=False
    )
    weights = {"proj.weight": rng.normal(size=(12, 8 * shuffle**2)).astype(np.float32)}
    features = rng.normal(size=(3, side * side, 8)).astype(np.float32)
    config = Idefics3Config(
        text_config={"hidden_size": 12, "num_attention_heads": 2}, vision_config={"hidden_size": 8},
        scale_factor=shuffle,
    )  # fmt: skip
    connector = Idefics3Connector(config)
    connector.modality_projection.proj.weight.data = torch.from_numpy(weights["proj.weight"])
    with torch.no_grad():
        expected = connector(torch.from_numpy(features)).numpy()
    found = run(spec, tower(side * side), weights, features)
    assert found.keys() == {"embeddings"}
    np.testing.assert_allclose(found["embeddings"], expected, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "theirs"), [("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_the_mlp_is_llavas(activation, theirs: str, bias: bool):
    from transformers import LlavaConfig
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    rng = np.random.default_rng(1)
    spec = ProjectorSpec(kind="mlp", num_tokens=5, hidden=12, activation=activation, bias=bias)
    shapes = {"linear_1.weight": (12, 8), "linear_1.bias": (12,), "linear_2.weight": (12, 12), "linear_2.bias": (12,)}
    weights = {name: rng.normal(size=shapes[name]).astype(np.float32) for name in projector.names(spec)}
    config = LlavaConfig(
        text_config={"model_type": "llama", "hidden_size": 12, "num_attention_heads": 2},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 8, "num_attention_heads": 2},
        projector_hidden_act=theirs, multimodal_projector_bias=bias,
    )  # fmt: skip
    module = LlavaMultiModalProjector(config)
    module.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()}, strict=True)
    features = rng.normal(size=(2, 5, 8)).astype(np.float32)
    with torch.no_grad():
        expected = module(torch.from_numpy(features)).numpy()
    np.testing.assert_allclose(run(spec, tower(5), weights, features)["embeddings"], expected, atol=1e-5)


def test_the_newline_is_handed_out_as_it_is_beside_the_rows():
    rng = np.random.default_rng(2)
    spec = ProjectorSpec(kind="mlp", num_tokens=5, hidden=12, bias=False, num_extra=1)
    shapes = {"linear_1.weight": (12, 8), "linear_2.weight": (12, 12), "newline": (12,)}
    weights = {name: rng.normal(size=shapes[name]).astype(np.float32) for name in projector.names(spec)}
    found = run(spec, tower(5), weights, rng.normal(size=(2, 5, 8)).astype(np.float32))
    assert np.array_equal(found["extra"], weights["newline"][None])


def test_a_transposed_matrix_is_refused_where_its_shape_tells():
    spec = ProjectorSpec(kind="pixel_shuffle", num_tokens=4, hidden=12, shuffle=2, bias=False)
    with pytest.raises(CheckpointError, match=r"proj\.weight has shape \(32, 12\), the config says \(12, 32\)"):
        run(spec, tower(16), {"proj.weight": np.zeros((32, 12), np.float32)}, np.zeros((1, 16, 8), np.float32))
