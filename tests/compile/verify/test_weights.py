"""Each weight against the checkpoint's: what the file holds, unpacked by other code than packed it."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from triptych.compile.graph import Store
from triptych.compile.verify.metrics import MAX_DB
from triptych.compile.verify.weights import Audit, compare, num_groups, values


def matrix(rows=6, width=64, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def runtime_values(node):
    compiled = ov.Core().compile_model(ov.Model([op.result(node)], [], "w"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.array(compiled([])[0])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("width", [64, 60])
def test_values_are_what_the_runtime_computes(precision, width):
    node = Store(precision, group_size=32).weight("w", matrix(width=width))

    np.testing.assert_allclose(values(node), runtime_values(node), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("precision", "groups"), [("fp32", 1), ("bf16", 1), ("int8", 1), ("int4", 2)])
def test_groups_are_counted_along_a_row(precision, groups):
    assert num_groups(Store(precision, group_size=32).weight("w", matrix())) == groups


def test_a_single_group_stands_out_from_ten_thousand():
    true = matrix(rows=5000)
    held = true.copy()
    held[1234, 32:] *= 1.5

    found = compare("w", true, held, 2)

    assert found.sqnr_db > 40
    assert found.gain == pytest.approx(1.5, rel=1e-5)
    assert found.group_sqnr_db == pytest.approx(6.02, abs=0.01)


def test_a_group_of_the_other_sign_is_infinitely_far():
    true = matrix()
    held = true.copy()
    held[2] *= -1

    assert compare("w", true, held, 1).gain == np.inf


def test_groups_of_zeros_and_fainter_ones_say_nothing():
    true = matrix()
    true[1] = 0
    true[2] *= 1e-8

    found = compare("w", true, true * np.where(np.arange(6) == 2, 2, 1)[:, None].astype(np.float32), 1)

    assert found.gain == pytest.approx(1.0)


def test_a_weight_that_is_missing_or_has_another_shape_or_is_besides_is_infinitely_far():
    store = Store("fp32")
    nodes = [store.weight(name, matrix(rows=rows)) for name, rows in (("kept", 6), ("wider", 7), ("besides", 6))]
    audit = Audit(ov.Model([op.result(node) for node in nodes], [], "part"))

    for name in ("kept", "wider", "missing"):
        audit.weight(name, matrix())

    gains = {found.name: found.gain for found in audit.finish()}
    assert gains == {"kept": 1.0, "wider": np.inf, "missing": np.inf, "besides": np.inf}
    assert {found.group_sqnr_db for found in audit.finish()} == {MAX_DB, -MAX_DB}
