"""A decoder whose layers forget apart: as exact as the ordinary one, and as its numpy twin when rows are gone."""

from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from numpy_decoder import Cached, logits, random_weights, spec_of, step
from triptych.backends.base import Placement
from triptych.backends.ov import open_decoder, open_layered_decoder
from triptych.backends.pool import dequantize
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.errors import BackendError, ConfigError

EXACT = Placement(compute="float", num_threads=1)
SPEC = spec_of(num_layers=3, head_dim=64)
LAYERS = np.arange(SPEC.num_layers)[:, None]
NUM_BLOCKS = 8
HAS_BF16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
CACHES = ("f32", "u8", "u4")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("decoder") / "decoder.xml"
    ov.save_model(build(SPEC, random_weights(SPEC).__getitem__, Store("fp32")), target, compress_to_fp16=False)
    return target


@pytest.fixture(scope="module")
def layered(path):
    opened = {cache: open_layered_decoder(path, EXACT, cache, with_queries=True) for cache in CACHES}
    for decoder in opened.values():
        decoder.allocate(NUM_BLOCKS)
    return opened


def tokens(seed: int = 1, num_tokens: int = 72) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, SPEC.hidden)).astype(np.float32)


def pages_of(blocks: list[int]) -> np.ndarray:
    """(layers, blocks), as they lie before anything is forgotten."""
    return np.array(blocks) * SPEC.num_layers + LAYERS


def run(decoder, x, start, past, tables, **more) -> dict[str, np.ndarray]:
    """Tokens x of one sequence at positions from `start`, on (layers, n) pages that hold `past` (layers,) rows."""
    return decoder(
        {
            **more,
            "embeddings": x,
            "position_ids": np.arange(start, start + len(x)),
            "past_lens": np.broadcast_to(past, SPEC.num_layers).reshape(-1, 1).astype(np.int32),
            "subsequence_begins": np.array([0, len(x)], np.int32),
            "block_indices": tables.astype(np.int32),
            "block_indices_begins": np.array([0, tables.shape[1]], np.int32),
            "max_context_len": np.array(start + len(x), np.int32),
            "sampled": np.arange(len(x)),
        }
    )


@pytest.mark.parametrize("cache", CACHES)
def test_before_anything_is_forgotten_it_answers_bit_for_bit_as_the_ordinary_one(cache, path, layered):
    ordinary, x = open_decoder(path, EXACT, cache), tokens()
    ordinary.allocate(NUM_BLOCKS)
    sequence, tables = Cached([5, 2, 7]), pages_of([5, 2, 7])

    for start, end in ((0, 50), (50, 71), (71, 72)):
        (expected,) = step(ordinary, [(sequence, x[start:end])])
        found = run(layered[cache], x[start:end], start, start, tables)["logits"]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("cache", ["f32", "u8"])
def test_with_rows_gone_it_answers_as_the_twin_that_does_not_see_them(cache, layered):
    decoder, x, border = layered[cache], tokens(), 69
    kept = [np.arange(0, 69, 2), np.arange(40), np.array([0, 3, 68])]
    run(decoder, x[:border], 0, 0, pages_of([5, 2, 7]))
    tables = np.array([[0, 9, 9], [1, 3, 4], [2, 2, 2]])  # of blocks 0, 1 and 3, dealt out as the layers need
    sources = [pages_of([5, 2, 7])[i, rows // 32] * 32 + rows % 32 for i, rows in enumerate(kept)]
    targets = [tables[i, np.arange(len(r)) // 32] * 32 + np.arange(len(r)) % 32 for i, r in enumerate(kept)]
    decoder.move(sources, targets)

    past = np.array([len(rows) for rows in kept])
    found = [run(decoder, x[i : i + 1], i, past + i - border, tables)["logits"].copy() for i in range(border, len(x))]

    left = np.ones((SPEC.num_layers, len(x), len(x)), bool)
    for layer, rows in enumerate(kept):
        left[layer, border:, :border] = np.isin(np.arange(border), rows)
    expected = logits(SPEC, random_weights(SPEC), x, left=left)[border:]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5 if cache == "f32" else 0.03, rtol=0)


@pytest.mark.parametrize("cache", CACHES)
def test_keys_and_values_are_read_as_they_were_written(cache, layered):
    x, tables = tokens(num_tokens=40), pages_of([1, 4])
    for decoder in (layered["f32"], layered[cache]):
        run(decoder, x, 0, 0, tables)

    for exact, found in zip(layered["f32"].read(0, tables[0], 40), layered[cache].read(0, tables[0], 40), strict=True):
        assert found.shape == (SPEC.num_kv_heads, 40, SPEC.head_dim)
        steps = {"f32": np.inf, "u8": 255, "u4": 15}[cache]
        groups = exact.reshape(SPEC.num_kv_heads, 40, -1, 32 if cache == "u4" else 64)
        half = 0.5 * np.ptp(groups, axis=-1, keepdims=True) / steps
        assert (np.abs(found.reshape(groups.shape) - groups) <= 1.01 * half + 1e-6).all()


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16")
def test_a_bf16_cache_is_read_and_moved_too(path, layered):
    x, tables = tokens(num_tokens=40), pages_of([1, 4])
    decoder, ordinary = (
        opens(path, Placement(compute="bfloat16", num_threads=1), "bf16")
        for opens in (open_layered_decoder, open_decoder)
    )
    decoder.allocate(NUM_BLOCKS)
    ordinary.allocate(NUM_BLOCKS)
    run(layered["f32"], x, 0, 0, tables)

    found = run(decoder, x, 0, 0, tables)["logits"]

    np.testing.assert_array_equal(found, step(ordinary, [(Cached([1, 4]), x)])[0])
    exact = layered["f32"].read(0, tables[0], 40)[0]
    np.testing.assert_allclose(decoder.read(0, tables[0], 40)[0], exact, atol=0.1)
    before, rows = decoder.read(2, tables[2], 32)[0], np.arange(32)
    decoder.move([rows[:0], rows[:0], tables[2, 0] * 32 + rows], [rows[:0], rows[:0], 20 * 32 + rows])
    np.testing.assert_array_equal(decoder.read(2, np.array([20]), 32)[0], before)


def test_a_stored_row_stands_for_known_numbers():
    facts = np.array([0.5, 3.0], np.float32).view(np.uint8)
    assert dequantize(np.concatenate([facts, np.uint8([0, 3, 5, 255])]), "u8", 4).tolist() == [-1.5, 0, 1, 126]
    assert dequantize(np.concatenate([facts, np.uint8([0x13, 0x5F])]), "u4", 4).tolist() == [-1, 0, 1, 6]
    assert dequantize(np.array([1.5, -2], np.float32).view(np.uint8), "f32", 2).tolist() == [1.5, -2]
    assert dequantize(np.array([0x3FC0, 0xC000], np.uint16).view(np.uint8), "bf16", 2).tolist() == [1.5, -2]


def test_every_row_is_read_before_any_is_written(layered):
    decoder, rows = layered["u8"], np.arange(32)
    run(decoder, tokens(), 0, 0, pages_of([0, 1, 2]))
    before = [decoder.read(layer, np.array([layer]), 32)[0] for layer in range(SPEC.num_layers)]
    around = [np.roll(np.arange(SPEC.num_layers), -1)[layer] * 32 + rows for layer in range(SPEC.num_layers)]

    decoder.move([layer * 32 + rows for layer in range(SPEC.num_layers)], around)

    for layer in range(SPEC.num_layers):
        np.testing.assert_array_equal(decoder.read(layer, around[layer][:1] // 32, 32)[0], before[layer])


def test_queries_are_given_out_after_rope_where_they_are_watched(layered):
    x, tables, decoder = tokens(num_tokens=34), pages_of([1, 4]), layered["f32"]
    whole = run(decoder, x, 0, 0, tables, watched=np.arange(34))["queries"]

    assert whole.shape == (SPEC.num_layers, 34, SPEC.num_heads, SPEC.head_dim)
    assert run(decoder, x, 0, 0, tables)["queries"].shape[1] == 0
    some = run(decoder, x[30:], 30, 30, tables, watched=np.array([1, 3]))["queries"]
    np.testing.assert_allclose(some, whole[:, [31, 33]], atol=1e-5)


def test_a_step_that_is_filled_up_answers_alike(layered):
    decoder, x = layered["f32"], tokens(num_tokens=33)  # of more than 32 rows: filled up to 48

    found = run(decoder, x, 0, 0, pages_of([6, 7]))["logits"]

    assert len(found) == 33
    np.testing.assert_allclose(found, logits(SPEC, random_weights(SPEC), x), atol=1e-5, rtol=0)


def test_an_unknown_device_for_a_layers_cache_is_refused(path):
    decoder = open_layered_decoder(path, EXACT, "u8")

    with pytest.raises(ConfigError, match="gpu:7"):
        decoder.allocate(2, ("cpu:0", "gpu:7", "cpu:0"))
    decoder.allocate(2, ("cpu:0",) * 3)
    with pytest.raises(BackendError, match="already"):
        decoder.allocate(2)
