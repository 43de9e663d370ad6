"""Weights on top of each other: the same answers from fewer products, and each weight is found again."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from numpy_decoder import Cached, random_weights, spec_of, step
from triptych.backends.base import Placement
from triptych.backends.ov import open_decoder, open_plain_decoder
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.compile.join import join, rows
from triptych.compile.verify.weights import Audit

EXACT = Placement(compute="float")
NUM_TOKENS = 70  # three blocks, the last one not full
TOLERANCE = 1e-5  # as of the plain ones, tests/compile/test_decoder.py

SHAPES = {
    "grouped heads": {},
    "biased queries, keys and values": {"qkv_bias": True},
    "normed queries and keys": {"qk_norm": True},
    "sliding window": {"sliding_window": 20},
}


def answer(path, x):
    every = np.arange(len(x))
    return open_plain_decoder(path, EXACT)({"embeddings": x, "position_ids": every, "sampled": every})["logits"]


def products(model: ov.Model) -> int:
    return sum(node.get_type_name() == "MatMul" for node in model.get_ordered_ops())


@pytest.mark.parametrize("precision", ["int4", "int8", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("changed", SHAPES.values(), ids=SHAPES.keys())
def test_joined_products_answer_as_the_plain_ones(changed, precision, tmp_path):
    spec = spec_of(**changed)
    weights = random_weights(spec)
    x = np.random.default_rng(1).standard_normal((NUM_TOKENS, spec.hidden)).astype(np.float32)
    model = build(spec, weights.__getitem__, Store(precision, group_size=32))
    path = tmp_path / "plain.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    expected, before = answer(path, x), products(model)

    join(model)
    path = tmp_path / "joined.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    decoder = open_decoder(path, EXACT, "f32")
    decoder.allocate(4)

    assert products(model) == before - 3 * spec.num_layers
    np.testing.assert_allclose(answer(path, x), expected, atol=TOLERANCE, rtol=0)
    (paged,) = step(decoder, [(Cached([2, 0, 3]), x)])
    np.testing.assert_allclose(paged, expected, atol=TOLERANCE, rtol=0)


def test_each_weight_is_found_again_and_one_in_anothers_place_is_seen():
    spec = spec_of(num_layers=1)
    weights = random_weights(spec)

    def audited(changes=None):
        model = build(spec, {**weights, **(changes or {})}.__getitem__, Store("int8"))
        join(model)
        audit = Audit(model)
        build(spec, weights.__getitem__, audit)
        return {figure.name: figure.gain for figure in audit.finish()}

    right = audited()
    assert all(gain < 1.01 for gain in right.values())
    assert {f"layers.0.self_attn.{name}_proj" for name in "qkvo"} < right.keys()
    key, value = (f"layers.0.self_attn.{name}_proj.weight" for name in "kv")
    wrong = audited({key: weights[value], value: weights[key]})
    assert {name for name, gain in wrong.items() if gain > 1.01} == {key[:-7], value[:-7]}


@pytest.mark.parametrize(
    "others",
    [("int4", 32, 64, 64), ("int8", 64, 64, 3), ("bf16", 64, 64, 64)],
    ids=["finer groups", "another height", "another type"],
)
def test_only_weights_of_one_layout_are_joined(others):
    precision, group, width, height = others
    x = op.parameter([-1, width], ov.Type.f32)
    random = np.random.default_rng(0)
    first, second = Store("int8"), Store(precision, group_size=group if group in (32, 64) else 64)
    nodes = [
        store.linear(x, name, random.standard_normal((tall, width)).astype(np.float32))
        for store, name, tall in ((first, "a", 4), (second, "b", height))
    ]
    model = ov.Model([op.result(node) for node in nodes], [x], "part")
    join(model)
    assert products(model) == (1 if precision == "int8" else 2)
    nodes = [node for node in model.get_ordered_ops() if node.get_friendly_name().endswith(".weight")]
    assert sorted(name for node in nodes for name, _ in rows(node)) == ["a.weight", "b.weight"]


def test_nibbles_that_end_within_a_byte_are_left_apart():
    x = op.parameter([-1, 1], ov.Type.f32)
    tensors = [ov.Tensor(ov.Type.u4, ov.Shape([3, 1])) for _ in range(2)]
    weights = [op.convert(ov.op.Constant(tensor), "f32") for tensor in tensors]
    model = ov.Model([op.result(op.matmul(x, weight, False, True)) for weight in weights], [x], "part")
    join(model)
    assert products(model) == 2
