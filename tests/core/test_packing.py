"""Packing loses nothing, and lays nibbles out as OpenVINO reads them."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.packing import num_words, pack_nibbles, pack_words, unpack_words

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9)
NIBBLES = hnp.arrays(np.uint8, SHAPES, elements=st.integers(0, 15))


@given(NIBBLES)
def test_unpacking_gives_back_what_was_packed(values):
    packed = pack_nibbles(values)

    assert packed.nbytes == (values.size + 1) // 2
    both = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
    np.testing.assert_array_equal(both[: values.size].reshape(values.shape), values)


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


@st.composite
def rows_of_bits(draw):
    bits = draw(st.integers(1, 8))
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=70))
    return bits, draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))


@given(rows_of_bits())
def test_words_give_back_numbers_of_any_bits(case):
    bits, values = case

    words = pack_words(values, bits)

    assert words.dtype == np.int32
    assert words.shape == (len(values), num_words(values.shape[1], bits))
    np.testing.assert_array_equal(unpack_words(words, bits, values.shape[1]), values)


@pytest.mark.reference
@settings(deadline=None)  # the first example pays for the imports
@given(rows_of_bits())
def test_words_are_those_of_compressed_tensors(case):
    import torch
    from compressed_tensors.compressors.pack_quantized import helpers

    bits, values = case
    signed = torch.from_numpy((values.astype(np.int16) - (1 << (bits - 1))).astype(np.int8))

    np.testing.assert_array_equal(pack_words(values, bits), helpers.pack_to_int32(signed, bits).numpy())
    across = helpers.pack_to_int32(signed.T.contiguous(), bits, packed_dim=0).numpy()
    np.testing.assert_array_equal(pack_words(values, bits).T, across)


def test_a_number_goes_on_in_the_next_word():
    word, following = pack_words(np.array([[0] * 10 + [5, 7]], np.uint8), 3)[0].view(np.uint32)

    assert word == 0b01 << 30
    assert following == 0b1 | 0b111 << 1


def test_words_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="3 bits hold 0 to 7, got 8"):
        pack_words(np.array([[8]], np.uint8), 3)
    with pytest.raises(ValueError, match="11 numbers of 3 bits take 2 words, got 1"):
        unpack_words(np.zeros((1, 1), np.int32), 3, 11)
