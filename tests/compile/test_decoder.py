"""The decoder's graph: plain, paged and numpy agree for every shape; and it says what it cannot build."""

from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from numpy_decoder import Cached, logits, random_weights, spec_of, step
from triptych.backends.base import Placement
from triptych.backends.ov import open_decoder, open_plain_decoder
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.compile.quantize import quantize
from triptych.core.quantized import dequantize
from triptych.core.spec import RopeSpec
from triptych.errors import CheckpointError

EXACT = Placement(compute="float")
NUM_TOKENS = 70  # three blocks, the last one not full
TOLERANCE = 1e-5  # greatest seen over all shapes below: 2.1e-6, logits to ±4.4

SHAPES = {
    "grouped heads": {},
    "as many key heads as query heads": {"num_kv_heads": 4},
    "one key head": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 80},
    "narrow odd-sized heads": {"head_dim": 10, "num_heads": 6, "num_kv_heads": 3},
    "biased queries, keys and values": {"qkv_bias": True},
    "normed queries and keys": {"qk_norm": True},
    "tied head": {"tied": True},
    "linear rope": {"rope": RopeSpec(theta=1e4, scaling="linear", factor=4.0)},
    "llama3 rope": {"rope": RopeSpec(theta=5e5, scaling="llama3", factor=8.0, original_positions=64)},
    "sliding window": {"sliding_window": 20},
    "sliding window of one block": {"sliding_window": 32, "num_layers": 3},
    "one layer": {"num_layers": 1},
}


def embeddings(hidden: int = 64, num_tokens: int = NUM_TOKENS) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((num_tokens, hidden)).astype(np.float32)


def saved(folder: Path, spec, weights, store: Store | None = None) -> Path:
    model = build(spec, weights.__getitem__, store or Store("fp32"))
    ov.save_model(model, folder / "decoder.xml", compress_to_fp16=False)
    return folder / "decoder.xml"


def plain(path: Path, x: np.ndarray, placement: Placement = EXACT) -> np.ndarray:
    every = np.arange(len(x))
    return open_plain_decoder(path, placement)({"embeddings": x, "position_ids": every, "sampled": every})["logits"]


@pytest.mark.parametrize("changed", SHAPES.values(), ids=SHAPES.keys())
def test_plain_paged_and_numpy_agree(changed, tmp_path):
    spec = spec_of(**changed)
    weights, x = random_weights(spec), embeddings()
    path = saved(tmp_path, spec, weights)
    decoder = open_decoder(path, EXACT, "f32")
    decoder.allocate(4)

    expected = logits(spec, weights, x)
    (paged,) = step(decoder, [(Cached([2, 0, 3]), x)])

    np.testing.assert_allclose(plain(path, x), expected, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(paged, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_quantized_decoder_equals_the_same_decoder_with_rounded_weights(precision, tmp_path):
    spec = spec_of(hidden=64, intermediate=128)
    weights, x = random_weights(spec), embeddings()

    def rounded(name):
        is_int4 = precision == "int4" and name != "lm_head.weight"
        return dequantize(quantize(weights[name], bits=4 if is_int4 else 8, group_size=64 if is_int4 else None))

    twin = {name: rounded(name) if values.ndim == 2 else values for name, values in weights.items()}

    found = plain(saved(tmp_path, spec, weights, Store(precision)), x)

    np.testing.assert_allclose(found, logits(spec, twin, x), atol=TOLERANCE, rtol=0)
    assert np.abs(found - logits(spec, weights, x)).max() > 100 * TOLERANCE


def test_only_sampled_rows_come_out_in_the_order_asked(tmp_path):
    spec = spec_of()
    x = embeddings()
    decoder = open_plain_decoder(saved(tmp_path, spec, random_weights(spec)), EXACT)
    inputs = {"embeddings": x, "position_ids": np.arange(len(x))}

    every = decoder(inputs | {"sampled": np.arange(len(x))})["logits"]
    some = decoder(inputs | {"sampled": np.array([69, 3, 3])})["logits"]
    none = decoder(inputs | {"sampled": np.array([], np.int64)})["logits"]

    np.testing.assert_allclose(some, every[[69, 3, 3]], atol=TOLERANCE, rtol=0)
    assert none.shape == (0, spec.vocab_size)


def test_position_does_not_matter_only_distance_does(tmp_path):
    spec = spec_of()
    x = embeddings()
    decoder = open_plain_decoder(saved(tmp_path, spec, random_weights(spec)), EXACT)

    near, far = (
        decoder({"embeddings": x, "position_ids": np.arange(len(x)) + start, "sampled": np.arange(len(x))})["logits"]
        for start in (0, 1000)
    )

    np.testing.assert_allclose(far, near, atol=5e-4, rtol=0)  # f32 angles of 1,000 radians


def test_bf16_arithmetic_still_knows_positions_far_out(tmp_path):
    """bf16 counts to 256 only: angles rounded to it would turn keys at random from there on."""
    if "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no bf16")
    spec = spec_of()
    x = embeddings()
    path = saved(tmp_path, spec, random_weights(spec))
    errors = []
    for start in (0, 4001):
        inputs = {"embeddings": x, "position_ids": np.arange(len(x)) + start, "sampled": np.arange(len(x))}
        exact, rough = (open_plain_decoder(path, Placement(compute=c))(inputs)["logits"] for c in ("float", "bfloat16"))
        errors.append(np.abs(exact - rough).max())

    assert errors[1] < 2 * errors[0] + 0.01, errors


def test_fallbacks_and_parameters_are_counted():
    spec = spec_of(intermediate=100)
    weights = random_weights(spec)
    store = Store("int4")
    build(spec, weights.__getitem__, store)

    assert store.fallbacks == [
        *(f"layers.{i}.mlp.down_proj: width 100 is not a multiple of 64: int8" for i in range(spec.num_layers)),
        "lm_head: its errors are the part's own: int8",
    ]
    assert store.num_parameters == sum(v.size for n, v in weights.items() if n != "embed_tokens.weight")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_heads": 4, "num_kv_heads": 3}, "4 heads cannot share 3"),
    ],
)
def test_impossible_shapes_are_refused(changed, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        build(spec_of(**changed), dict.__getitem__, Store("fp32"))


def test_a_tensor_of_another_shape_is_refused_by_name():
    spec = spec_of()
    weights = random_weights(spec)
    weights["layers.1.mlp.up_proj.weight"] = weights["layers.1.mlp.up_proj.weight"].T

    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \(64, 96\), the config says"):
        build(spec, weights.__getitem__, Store("fp32"))
