"""The towers against their plain twins: a convolution, transformers' own modules, a walk by hand."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
import torch

from triptych.compile import vit
from triptych.compile.graph import Store
from triptych.core.spec import VisionSpec
from triptych.errors import CheckpointError

HALF = (0.5, 0.5, 0.5)


def spec(**changes) -> VisionSpec:
    facts = {
        "kind": "vit", "image_size": 30, "num_tokens": 16, "hidden": 24, "patch": 7, "num_layers": 2, "num_heads": 3,
        "intermediate": 40, "mean": HALF, "std": HALF,
    }  # fmt: skip
    return VisionSpec(**(facts | changes))


def weights_for(facts: VisionSpec, seed: int = 0):
    """Random tensors of every shape the tower wants, by name."""
    rng = np.random.default_rng(seed)
    hidden, inner = facts.hidden, facts.intermediate
    side = facts.image_size // facts.patch
    shapes = {
        "embeddings.patch_embedding.weight": (hidden, 3, facts.patch, facts.patch),
        "embeddings.position_embedding.weight": (side * side + facts.class_token, hidden),
        "mlp.fc1.weight": (inner, hidden),
        "mlp.fc1.bias": (inner,),
        "mlp.fc2.weight": (hidden, inner),
    }

    def shape(name: str) -> tuple[int, ...]:
        for end, found in shapes.items():
            if name.endswith(end):
                return found
        return (hidden, hidden) if "_proj.weight" in name else (hidden,)

    return {name: rng.normal(0, 0.3, shape(name)).astype(np.float32) for name in vit.names(facts)}


def run(facts: VisionSpec, weights, pixels: np.ndarray, store: Store | None = None) -> np.ndarray:
    model = vit.build(facts, lambda name: weights[name], store or Store("fp32"))
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    return compiled({"pixels": pixels})["features"]


def noise(size: int, num: int = 2) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (num, size, size, 3), np.uint8)


def siglip(facts: VisionSpec, weights) -> torch.nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=facts.hidden, intermediate_size=facts.intermediate, num_hidden_layers=facts.num_layers,
        num_attention_heads=facts.num_heads, image_size=facts.image_size, patch_size=facts.patch, hidden_act="gelu",
        vision_use_head=False, attn_implementation="eager",
    )  # fmt: skip
    return loaded(SiglipVisionModel(config), weights)


def clip(facts: VisionSpec, weights) -> torch.nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=facts.hidden, intermediate_size=facts.intermediate, num_hidden_layers=facts.num_layers,
        num_attention_heads=facts.num_heads, image_size=facts.image_size, patch_size=facts.patch,
        hidden_act=facts.activation, layer_norm_eps=facts.norm_eps, attn_implementation="eager",
    )  # fmt: skip
    return loaded(CLIPVisionModel(config), weights)


def loaded(model: torch.nn.Module, weights) -> torch.nn.Module:
    held = {name: torch.from_numpy(values) for name, values in weights.items()}
    found = model.load_state_dict(held, strict=False)
    assert not found.unexpected_keys
    return model.eval()


def normalized(pixels: np.ndarray, facts: VisionSpec) -> torch.Tensor:
    values = (pixels / 255.0 - np.array(facts.mean)) / np.array(facts.std)
    return torch.from_numpy(values.transpose(0, 3, 1, 2).astype(np.float32))


def test_siglip_with_a_rest_of_pixels_and_a_last_norm_is_transformers_siglip():
    facts = spec(post_norm=True)
    weights, pixels = weights_for(facts), noise(30)
    with torch.no_grad():
        expected = siglip(facts, weights)(normalized(pixels, facts)).last_hidden_state.numpy()
    np.testing.assert_allclose(run(facts, weights, pixels), expected, atol=2e-5)


@pytest.mark.parametrize("first_row", [0, 1])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_clip_with_and_without_its_class_token_is_transformers_clip(activation: str, first_row: int):
    facts = spec(
        class_token=True, first_row=first_row, num_tokens=17 - first_row, pre_norm=True, patch_bias=False,
        activation=activation, norm_eps=1e-5, mean=(0.48, 0.45, 0.4), std=(0.26, 0.27, 0.28),
    )  # fmt: skip
    weights, pixels = weights_for(facts), noise(30)
    with torch.no_grad():
        states = clip(facts, weights)(normalized(pixels, facts), output_hidden_states=True).hidden_states
    found = run(facts, weights, pixels)
    assert found.shape == (2, facts.num_tokens, 24)
    np.testing.assert_allclose(found, states[-1].numpy()[:, first_row:], atol=2e-5)


def test_a_tower_of_no_layers_hands_on_what_would_enter_the_first():
    facts = spec(num_layers=0)
    weights, pixels = weights_for(facts), noise(30)
    kernel = torch.from_numpy(weights["embeddings.patch_embedding.weight"])
    bias = torch.from_numpy(weights["embeddings.patch_embedding.bias"])
    convolved = torch.nn.functional.conv2d(normalized(pixels, facts), kernel, bias, stride=7)
    expected = convolved.flatten(2).transpose(1, 2).numpy() + weights["embeddings.position_embedding.weight"]
    np.testing.assert_allclose(run(facts, weights, pixels), expected, atol=1e-5)


def test_every_weight_is_asked_for_once_and_nothing_else():
    facts = spec(class_token=True, num_tokens=17, pre_norm=True, patch_bias=False)
    weights, asked = weights_for(facts), []

    def weight(name: str) -> np.ndarray:
        asked.append(name)
        return weights[name]

    store = Store("fp32")
    vit.build(facts, weight, store)
    assert sorted(asked) == sorted(vit.names(facts))
    class_row = 24  # the class token and its position become one row
    assert store.num_parameters == sum(values.size for values in weights.values()) - class_row


@pytest.mark.parametrize("fault", ["channels", "heads", "position"])
def test_a_fault_that_keeps_every_shape_is_seen(fault: str):
    facts = spec()
    weights, pixels = weights_for(facts), noise(30)
    broken = dict(weights)
    if fault == "channels":
        broken["embeddings.patch_embedding.weight"] = weights["embeddings.patch_embedding.weight"][:, ::-1]
    elif fault == "heads":
        name = "encoder.layers.1.self_attn.q_proj.weight"
        broken[name] = np.roll(weights[name], 8, axis=0)
    else:
        broken["embeddings.position_embedding.weight"] = np.roll(weights["embeddings.position_embedding.weight"], 1, 0)
    difference = np.abs(run(facts, broken, pixels) - run(facts, weights, pixels)).max()
    assert difference > 0.05


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 0.01), ("bf16", 0.05), ("int8", 0.1)])
def test_narrow_weights_stay_near_the_wide_ones(precision, tolerance: float):
    facts = spec()
    weights, pixels = weights_for(facts), noise(30)
    wide = run(facts, weights, pixels)
    narrow = run(facts, weights, pixels, Store(precision))
    assert 0 < np.linalg.norm(narrow - wide) / np.linalg.norm(wide) < tolerance


def test_a_tensor_of_another_shape_than_the_config_says_is_refused_by_name():
    facts = spec()
    weights = weights_for(facts)
    weights["encoder.layers.0.mlp.fc1.weight"] = weights["encoder.layers.0.mlp.fc1.weight"].T
    with pytest.raises(CheckpointError, match=r"mlp\.fc1\.weight has shape \(24, 40\)"):
        vit.build(facts, lambda name: weights[name], Store("fp32"))
