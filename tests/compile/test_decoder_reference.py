"""The decoder against transformers: same logits, and the same 64 greedy tokens through the paged cache."""

import numpy as np
import openvino as ov
import pytest

from numpy_decoder import Cached, spec_of, step
from triptych.backends.base import Placement
from triptych.backends.ov import open_decoder
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.core.spec import RopeSpec

pytestmark = pytest.mark.reference
pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "Llama": ({}, {"tied": True}),
    "Llama, untied, llama3 rope": (
        {"rope_parameters": LLAMA3},
        {"rope": RopeSpec(theta=5e5, scaling="llama3", factor=8.0, original_positions=64)},
    ),
    "Llama, linear rope": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope": RopeSpec(theta=1e4, scaling="linear", factor=4.0)},
    ),
    "Mistral": ({"sliding_window": None}, {}),
    "Mistral, window of 24": ({"sliding_window": 24}, {"sliding_window": 24}),
    "Qwen2": ({}, {"qkv_bias": True, "tied": True}),
    "Qwen3": ({"head_dim": 24}, {"qk_norm": True, "head_dim": 24}),
}
NUM_NEW = 64


def reference(kind: str, config: dict, spec, seed: int):
    """A tiny random transformers model; norms and biases are drawn too, so that none can be forgotten unseen."""
    import torch
    import transformers

    torch.manual_seed(seed)
    name = kind.split(",")[0]
    shape = {
        "vocab_size": spec.vocab_size, "hidden_size": spec.hidden, "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps, "tie_word_embeddings": spec.tied, "attn_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
    }  # fmt: skip
    settings = getattr(transformers, f"{name}Config")(**(shape | config))
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(kind, seed, tmp_path):
    import torch

    config, changed = KINDS[kind]
    spec = spec_of(**changed)
    model = reference(kind, config, spec, seed)
    weights = {name.removeprefix("model."): values.numpy() for name, values in model.state_dict().items()}
    ov.save_model(build(spec, weights.__getitem__, Store("fp32")), tmp_path / "d.xml", compress_to_fp16=False)
    decoder = open_decoder(tmp_path / "d.xml", Placement(compute="float"), "f32")
    decoder.allocate(4)
    prompt = np.random.default_rng(seed).integers(0, spec.vocab_size, 9)

    sequence, ids, rows = Cached([3, 1, 2]), list(prompt), []
    table = weights["embed_tokens.weight"]
    while len(ids) < len(prompt) + NUM_NEW:
        (found,) = step(decoder, [(sequence, table[ids[sequence.num_tokens :]])])
        rows.append(found)
        ids.append(int(found[-1].argmax()))

    with torch.no_grad():
        expected = model(torch.tensor([ids[:-1]])).logits[0].numpy()
    np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-4, rtol=0)
    assert ids[len(prompt) :] == expected[len(prompt) - 1 :].argmax(-1).tolist()
