"""Packing loses nothing, and lays nibbles out as OpenVINO reads them."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.packing import pack_nibbles, unpack_nibbles

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9)
NIBBLES = hnp.arrays(np.uint8, SHAPES, elements=st.integers(0, 15))


@given(NIBBLES)
def test_unpacking_gives_back_what_was_packed(values):
    packed = pack_nibbles(values)

    assert packed.nbytes == (values.size + 1) // 2
    np.testing.assert_array_equal(unpack_nibbles(packed, values.shape), values)


def test_the_earlier_number_lies_in_the_low_half():
    np.testing.assert_array_equal(pack_nibbles(np.array([1, 2, 3], np.uint8)), [0x21, 0x03])


def test_openvino_reads_the_same_order():
    ov = pytest.importorskip("openvino")
    values = np.arange(16, dtype=np.uint8).reshape(2, 8)
    tensor = ov.Tensor(ov.Type.u4, ov.Shape([2, 8]))
    tensor.data.reshape(-1)[:] = pack_nibbles(values)
    model = ov.Model([ov.opset13.convert(ov.op.Constant(tensor), "f32")], [], "u4")

    np.testing.assert_array_equal(ov.Core().compile_model(model, "CPU")([])[0], values)


@given(hnp.arrays(np.uint8, SHAPES, elements=st.integers(0, 255)).filter(lambda a: a.size and a.max() > 15))
def test_a_number_over_four_bits_is_refused(values):
    with pytest.raises(ValueError, match="4 bits"):
        pack_nibbles(values)


def test_bytes_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ValueError, match="5 numbers of 4 bits take 3 bytes, got 2"):
        unpack_nibbles(np.zeros(2, np.uint8), (5,))
