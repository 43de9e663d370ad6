"""OpenVINO: paging, cache types, placements, and errors that say what to do."""

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from numpy_decoder import Cached, logits, random_weights, spec_of, step
from triptych.backends import paged
from triptych.backends.base import Placement
from triptych.backends.ov import devices, open_decoder, open_part
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.errors import BackendError, BundleError, ConfigError

EXACT = Placement(compute="float")
SPEC = spec_of()
NUM_TOKENS = 70
TOLERANCE = 1e-5  # greatest seen: 2e-6, logits to ±3.6
HAS_BF16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
CACHE_ERROR = {"f32": TOLERANCE, "u8": 0.021, "u4": 0.33}  # greatest seen, and half as much again


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("decoder") / "decoder.xml"
    ov.save_model(build(SPEC, random_weights(SPEC).__getitem__, Store("fp32")), target, compress_to_fp16=False)
    return target


@pytest.fixture(scope="module")
def decoders(path):
    opened = {}
    for cache in CACHE_ERROR:
        opened[cache] = open_decoder(path, EXACT, cache)
        opened[cache].allocate(24)
    return opened


def tokens(seed: int = 1, num_tokens: int = NUM_TOKENS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, SPEC.hidden)).astype(np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    return logits(SPEC, random_weights(SPEC), x)


def chunked(decoder, x, size, blocks) -> np.ndarray:
    sequence = Cached(blocks)
    return np.concatenate([step(decoder, [(sequence, x[a : a + size])])[0] for a in range(0, len(x), size)])


@pytest.mark.parametrize("cache", CACHE_ERROR)
def test_a_cache_is_as_exact_as_its_type(cache, decoders):
    x = tokens()

    error = np.abs(chunked(decoders[cache], x, len(x), [5, 2, 7]) - expected(x)).max()

    assert error < CACHE_ERROR[cache]


@pytest.mark.parametrize("cache", CACHE_ERROR)
def test_chunks_of_every_size_give_the_same_logits(cache, decoders):
    x = tokens()
    whole = chunked(decoders[cache], x, len(x), [5, 2, 7])

    for size in range(1, len(x)):
        found = chunked(decoders[cache], x, size, [1, 3, 4])
        np.testing.assert_allclose(found, whole, atol=TOLERANCE, rtol=0, err_msg=f"chunks of {size}")


@pytest.mark.parametrize("cache", CACHE_ERROR)
def test_sequences_in_one_call_do_not_see_one_another(cache, decoders):
    """A prompt, a second chunk and two decode rows at once, on blocks in no order, against each alone."""
    decoder, xs = decoders[cache], [tokens(seed) for seed in range(4)]
    alone = [chunked(decoder, x, len(x), [20, 21, 22]) for x in xs]
    sequences = [Cached([9, 4, 11]), Cached([0, 13, 2]), Cached([7, 1, 15]), Cached([3, 8, 5])]
    step(decoder, [(sequences[1], xs[1][:40]), (sequences[2], xs[2][:69])])
    step(decoder, [(sequences[3], xs[3][:31])])

    mixed = step(decoder, [
        (sequences[0], xs[0]), (sequences[1], xs[1][40:]), (sequences[2], xs[2][69:]), (sequences[3], xs[3][31:32]),
    ])  # fmt: skip

    for found, whole in zip(mixed, (alone[0], alone[1][40:], alone[2][69:], alone[3][31:32]), strict=True):
        np.testing.assert_allclose(found, whole, atol=TOLERANCE, rtol=0)


def test_sequences_may_share_the_blocks_of_a_prefix(decoders):
    decoder, x = decoders["f32"], tokens()
    first, other = Cached([6, 2, 7]), np.concatenate([x[:64], tokens(9)[64:]])
    step(decoder, [(first, x)])
    second = Cached([6, 2, 12], num_tokens=64)

    (found,) = step(decoder, [(second, other[64:])])
    (again,) = step(decoder, [(Cached([6, 2, 7], num_tokens=69), x[69:])])

    np.testing.assert_allclose(found, expected(other)[64:], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(again, expected(x)[69:], atol=TOLERANCE, rtol=0)


def test_a_row_is_the_same_alone_and_among_sixteen(decoders):
    decoder, x = decoders["u8"], tokens(num_tokens=32)
    alone = Cached([0, 1])
    step(decoder, [(alone, x[:31])])
    (single,) = step(decoder, [(alone, x[31:])])
    crowd = [Cached([i]) for i in range(2, 18)]
    step(decoder, [(sequence, x[:31]) for sequence in crowd])

    for row in step(decoder, [(sequence, x[31:]) for sequence in crowd]):
        np.testing.assert_allclose(row, single, atol=TOLERANCE, rtol=0)  # here bitwise; wider models pick other kernels


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16")
def test_bf16_arithmetic_takes_a_bf16_cache(path):
    decoder = open_decoder(path, Placement(compute="bfloat16"), "bf16")
    decoder.allocate(4)
    x = tokens()

    assert np.abs(chunked(decoder, x, 33, [2, 0, 1]) - expected(x)).max() < 0.1
    assert decoder.place().endswith("threads") or decoder.place().endswith("thread")
    assert "bf16" in decoder.place()


def test_blocks_are_counted_in_bytes(decoders):
    numbers = 2 * SPEC.num_layers * SPEC.num_kv_heads * 32 * SPEC.head_dim

    assert decoders["f32"].block_bytes == 4 * numbers
    assert numbers < decoders["u8"].block_bytes < 2 * numbers
    assert numbers / 2 < decoders["u4"].block_bytes < numbers * 1.1


def test_a_u4_cache_gives_each_32_numbers_their_own_scale(tmp_path):
    """On SmolLM2 it diverges less than half as far as with one scale a head (KL 0.037 for 0.087 nats a token)."""
    spec = spec_of(head_dim=64)
    weights, x = random_weights(spec), tokens()
    ov.save_model(build(spec, weights.__getitem__, Store("fp32")), tmp_path / "d.xml", compress_to_fp16=False)
    decoder = open_decoder(tmp_path / "d.xml", EXACT, "u4")
    decoder.allocate(3)

    error = np.abs(chunked(decoder, x, len(x), [0, 1, 2]) - logits(spec, weights, x)).max()

    assert error < CACHE_ERROR["u4"]
    assert decoder.block_bytes == 2 * spec.num_layers * spec.num_kv_heads * 32 * (64 // 2 + 2 * 8)


def test_results_are_the_callers_to_keep(decoders):
    x = tokens()
    (first,) = step(decoders["f32"], [(Cached([0, 1, 2]), x)])
    kept = first.copy()
    step(decoders["f32"], [(Cached([0, 1, 2]), -x)])

    np.testing.assert_array_equal(first, kept)


def test_a_step_may_sample_nothing(decoders):
    x = tokens(num_tokens=3)
    found = decoders["f32"](
        {
            "embeddings": x, "position_ids": np.arange(3), "past_lens": [0], "subsequence_begins": [0, 3],
            "block_indices": [0], "block_indices_begins": [0, 1], "max_context_len": 3, "sampled": [],
        }
    )["logits"]  # fmt: skip

    assert found.shape == (0, SPEC.vocab_size)


def test_a_decoder_without_a_cache_or_with_two_is_refused(path):
    decoder = open_decoder(path, EXACT, "f32")
    with pytest.raises(BackendError, match="the cache was not made"):
        step(decoder, [(Cached([0]), tokens(num_tokens=3))])

    decoder.allocate(2)
    with pytest.raises(BackendError, match="already made: 2 blocks"):
        decoder.allocate(2)


def test_a_cache_that_cannot_fit_is_refused_with_its_size(path):
    with pytest.raises(BackendError, match="no memory for 1,000,000,000,000 blocks of KV cache"):
        open_decoder(path, EXACT, "u8").allocate(10**12)


@pytest.mark.parametrize("cache", ["bf16", "f32"])
def test_a_cache_type_the_arithmetic_cannot_read_is_refused(cache, path):
    compute = {"bf16": "float", "f32": "bfloat16"}[cache]
    if not HAS_BF16:
        pytest.skip("this CPU has no bf16")
    with pytest.raises(ConfigError, match="KV cache needs"):
        open_decoder(path, Placement(compute=compute), cache)


@pytest.mark.parametrize("device", ["gpu:7", "cpu:1", "cpu", "CPU", "tpu:0", ""])
def test_an_unknown_device_is_refused_with_the_known_ones(device, path):
    with pytest.raises(ConfigError, match="no device") as caught:
        open_part(path, Placement(device=device))

    assert "cpu:0" in caught.value.hint
    assert "cpu:0" in devices()


def test_arithmetic_the_device_lacks_is_refused(path):
    if "FP16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has fp16")
    with pytest.raises(ConfigError, match="no half arithmetic"):
        open_part(path, Placement(compute="half"))


def test_threads_and_precision_are_those_asked_for(path):
    assert open_part(path, Placement(compute="float", num_threads=1)).place().endswith("f32, 1 thread")


def test_nothing_of_the_plain_attention_is_left_in_the_paged_form():
    spec = spec_of(sliding_window=20)
    model = build(spec, random_weights(spec).__getitem__, Store("fp32"))
    paged.make_paged(model)

    kinds = {node.get_type_name() for node in model.get_ordered_ops()}
    assert "PagedAttentionExtension" in kinds
    assert not kinds & {"ScaledDotProductAttention", "Range", "LogicalAnd", "Transpose", "Tile"}


def test_a_model_that_is_no_decoder_is_refused(tmp_path):
    x = op.parameter([1], ov.Type.f32, name="x")
    ov.save_model(ov.Model([op.result(op.relu(x))], [x], "other"), tmp_path / "other.xml")

    with pytest.raises(BundleError, match="no attention facts"):
        open_decoder(tmp_path / "other.xml", EXACT, "u8")


@pytest.mark.parametrize("content", [None, "", "<net/>", "garbage"])
def test_a_file_that_is_no_model_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "m.xml").write_text(content)
    with pytest.raises(BackendError, match="cannot read"):
        open_part(tmp_path / "m.xml", EXACT)


def test_inputs_of_the_wrong_name_or_shape_are_refused(decoders):
    with pytest.raises(BackendError, match="inputs are .*got"):
        decoders["f32"]({"embeddings": tokens()})
    with pytest.raises(BackendError, match="CPU"):
        step(decoders["f32"], [(Cached([0, 1, 2]), tokens()[:, :-1])])


def test_an_openvino_whose_operator_changed_is_refused_with_the_version_we_need(path, monkeypatch):
    monkeypatch.setattr(paged, "_rest", lambda *_: [])

    with pytest.raises(BackendError, match="refused our use of its paged attention") as caught:
        open_decoder(path, EXACT, "u8")

    assert f"written for OpenVINO {paged.PINNED} exactly" in caught.value.hint


def test_an_openvino_without_the_operator_is_refused(path, monkeypatch):
    monkeypatch.delattr("openvino.op._PagedAttentionExtension")

    with pytest.raises(BackendError, match="_PagedAttentionExtension"):
        open_decoder(path, EXACT, "u8")
