"""What a weight is stored as gives it back, and is what compressed-tensors' own code reads."""

from dataclasses import replace

import numpy as np
import pytest

from lowbits import random_weight
from triptych.core.quantized import Quantized, dequantize
from triptych.core.stored import Scheme, decode, encode, parse_scheme, scheme_of
from triptych.errors import CheckpointError

KINDS = [
    *(random_weight(bits=bits, symmetric=symmetric) for bits in range(1, 9) for symmetric in (True, False)),
    random_weight(bits=4, size=None, scale_type="bfloat16"),
    random_weight(bits=8, size=None, symmetric=False, scale_type="float32"),
    random_weight(bits=8, size=None, scale_type="bfloat16", input_scale=0.25),
    random_weight(bits=8, size=None, symmetric=False, input_scale=0.25),
    random_weight(bits=4, input_scale=0.25),
    random_weight(7, 96, bits=3, symmetric=False),
]


def name(held: Quantized) -> str:
    return str(scheme_of(held))


def stored(held: Quantized) -> dict[str, np.ndarray]:
    return {f"m.{kind}": values for kind, values in encode(held).items()}


def read(tensors: dict[str, np.ndarray], scheme: Scheme) -> Quantized:
    return decode("m", scheme, {key: lambda values=values: values for key, values in tensors.items()})


@pytest.mark.parametrize("held", KINDS, ids=name)
def test_a_weight_is_read_as_it_was_written(held):
    found = read(stored(held), scheme_of(held))

    for kind in ("codes", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(found, kind), getattr(held, kind))
    assert (found.bits, found.shape, found.input_scale) == (held.bits, held.shape, held.input_scale)


@pytest.mark.parametrize("held", KINDS, ids=name)
def test_a_scheme_is_told_in_a_configs_words(held):
    scheme = scheme_of(held)

    assert parse_scheme("here", scheme.group(["m"])) == scheme


@pytest.mark.reference
@pytest.mark.parametrize("held", KINDS, ids=name)
def test_compressed_tensors_reads_the_same_numbers(held):
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = scheme_of(held).group(["m"])
    scheme = QuantizationScheme.model_validate(group)
    state = {key: torch.from_numpy(np.asarray(value, _plain(value))) for key, value in encode(held).items()}
    state["weight_scale"] = state["weight_scale"].float()  # in f32 nothing is rounded

    found = BaseCompressor.get_value_from_registry(group["format"]).decompress(state, scheme)["weight"]

    np.testing.assert_array_equal(found.numpy(), dequantize(held))


def _plain(values: np.ndarray) -> np.dtype:
    return np.dtype(np.float32) if values.dtype.kind in "fV" else values.dtype


def test_a_kernel_keeps_its_shape():
    held = replace(random_weight(6, 36, bits=8, size=None), shape=(6, 4, 3, 3))

    assert read(stored(held), scheme_of(held)).shape == (6, 4, 3, 3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"m.weight_packed": np.zeros((8, 7), np.int32)}, r"m: weight_packed has shape \(8, 7\)"),
        ({"m.weight_scale": np.zeros((8, 3), np.float16)}, r"m: weight_scale has shape \(8, 3\), groups of 32"),
        ({"m.weight_shape": np.array([8, 60])}, "m: width 60 is not a multiple of 32"),
        ({"m.weight_zero_point": np.zeros((2, 2), np.int32)}, r"m: weight_zero_point has shape \(2, 2\)"),
    ],
)
def test_shapes_that_disagree_are_refused_by_name(change, complaint):
    held = random_weight(symmetric=False)

    with pytest.raises(CheckpointError, match=complaint):
        read(stored(held) | change, scheme_of(held))


def test_a_tensor_that_is_missing_is_named():
    tensors = stored(random_weight())
    del tensors["m.weight_scale"]

    with pytest.raises(CheckpointError, match="m has no weight_scale"):
        read(tensors, scheme_of(random_weight()))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}, "type 'float'"),
        ({"weights": {"num_bits": 8, "type": "int", "strategy": "block"}}, "strategy 'block'"),
        ({"output_activations": {"num_bits": 8}}, "rounded outputs"),
        ({"input_activations": {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": False}}, "static inputs"),
    ],
)
def test_what_is_not_whole_numbers_is_refused(change, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        parse_scheme("group_0", scheme_of(random_weight()).group(["m"]) | change)
