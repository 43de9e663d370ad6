"""One suite over every backend: what a part must do wherever it runs, and that all of them agree.

The tolerance was measured over six kinds and two seeds of tiny models, whose features reach 10, embeddings 22 and
logits 21: the worst differences between the backends were 6.5e-6 (vision), 4e-6 (projector) and 4.3e-5 (decoder).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from checkpoints import KINDS, make
from parts import BLOCK, Parts, Run, compile_parts, open_ov, open_reference, step, whole
from triptych.errors import BackendError

pytestmark = pytest.mark.reference

TOLERANCE = 1e-4
SEEDS = (0, 1)
NUM_BLOCKS = 12

Open = Callable[[str, int], Parts]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Parts]:
    """backend, kind, seed → the parts, opened once."""
    root = tmp_path_factory.getbasetemp()

    @cache
    def compiled(kind: str, seed: int) -> tuple:
        source, target = make(kind, root, seed), tmp_path_factory.mktemp("parts") / "parts"
        return source, target, compile_parts(source, target)

    @cache
    def parts(backend: str, kind: str, seed: int) -> Parts:
        source, target, spec = compiled(kind, seed)
        found = open_ov(spec, target) if backend == "ov" else open_reference(spec, source)
        found.decoder.allocate(NUM_BLOCKS)
        return found

    return parts


@pytest.fixture(params=["ov", "reference"])
def backend(request: pytest.FixtureRequest, opened) -> Open:
    return lambda kind, seed: opened(request.param, kind, seed)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def tiles_of(parts: Parts, num_tiles: int, seed: int = 0) -> np.ndarray:
    size = parts.spec.vision.image_size
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (num_tiles, 4, 4, 3))
    tiles = np.kron(coarse, np.ones((1, -(-size // 4), -(-size // 4), 1), int))[:, :size, :size]
    return np.clip(tiles + rng.integers(-9, 10, tiles.shape), 0, 255).astype(np.uint8)


def sequence(parts: Parts, num_tokens: int, seed: int = 0) -> np.ndarray:
    """Embeddings of text, with a run of rows that are no token's in the middle."""
    rng = np.random.default_rng(seed)
    rows = parts.table[rng.integers(0, len(parts.table), num_tokens)]
    third = num_tokens // 3
    rows[third : 2 * third] = rng.normal(0, 1, (third, rows.shape[1]))
    return rows.astype(np.float32)


# ── what a part must do wherever it runs ────────────────────────────────────────────────────────────────────────


def test_every_tile_becomes_the_rows_that_the_spec_promises(backend: Open, kind: str):
    parts = backend(kind, 0)
    vision, projector = parts.spec.vision, parts.spec.projector
    features = parts.vision({"pixels": tiles_of(parts, 3)})
    assert features["features"].shape == (3, vision.num_tokens, vision.hidden)
    found = parts.projector(features)
    assert found["embeddings"].shape == (3, projector.num_tokens, parts.spec.decoder.hidden)
    assert found["embeddings"].dtype == np.float32
    if projector.num_extra:
        assert found["extra"].shape == (projector.num_extra, parts.spec.decoder.hidden)
    else:
        assert found.keys() == {"embeddings"}


def test_a_tile_does_not_see_its_neighbours(backend: Open, kind: str):
    parts = backend(kind, 0)
    tiles = tiles_of(parts, 5)
    together = parts.vision({"pixels": tiles})["features"]
    alone = np.concatenate([parts.vision({"pixels": tile[None]})["features"] for tile in tiles])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_what_a_call_returned_is_not_changed_by_the_next(backend: Open):
    parts = backend("smolvlm", 0)
    first = parts.vision({"pixels": tiles_of(parts, 2)})["features"]
    kept = first.copy()
    parts.vision({"pixels": tiles_of(parts, 2, seed=1)})
    assert np.array_equal(first, kept)


def test_only_the_sampled_rows_get_logits_in_the_order_asked(backend: Open, kind: str):
    parts = backend(kind, 0)
    embeddings = sequence(parts, 40)
    everything = whole(parts, embeddings, [3, 7])
    assert everything.shape == (40, parts.spec.decoder.vocab_size)
    some = parts.decoder(step([Run(embeddings, 0, [3, 7])], [39, 5, 5]))["logits"]
    np.testing.assert_allclose(some, everything[[39, 5, 5]], atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, 50])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(backend: Open, chunk: int):
    parts = backend("idefics3", 0)
    embeddings, blocks = sequence(parts, 70), [9, 1, 4]
    expected = whole(parts, embeddings, [0, 2, 5])
    found = []
    for start in range(0, 70, chunk):
        piece = embeddings[start : start + chunk]
        found.append(parts.decoder(step([Run(piece, start, blocks)], range(len(piece))))["logits"].copy())
    np.testing.assert_allclose(np.concatenate(found), expected, atol=TOLERANCE)


def test_sequences_of_one_step_do_not_see_one_another(backend: Open, kind: str):
    parts = backend(kind, 0)
    long, short = sequence(parts, 50), sequence(parts, 20, seed=1)
    expected = [whole(parts, long, [0, 1]), whole(parts, short, [2])]
    parts.decoder(step([Run(long[:45], 0, [3, 4])], [0]))
    mixed = parts.decoder(step([Run(long[45:], 45, [3, 4]), Run(short, 0, [5])], range(25)))["logits"]
    np.testing.assert_allclose(mixed, np.concatenate([expected[0][45:], expected[1]]), atol=TOLERANCE)


def test_two_sequences_may_share_the_pages_of_a_common_beginning(backend: Open):
    parts = backend("llava", 0)
    common, tails = sequence(parts, 32), [sequence(parts, 6, seed=seed) for seed in (1, 2)]
    expected = [whole(parts, np.concatenate([common, tail]), [0, 1])[32:] for tail in tails]
    parts.decoder(step([Run(common, 0, [8])], [0]))
    shared = parts.decoder(step([Run(tails[0], 32, [8, 9]), Run(tails[1], 32, [8, 10])], range(12)))["logits"]
    np.testing.assert_allclose(shared, np.concatenate(expected), atol=TOLERANCE)


def test_pages_are_made_once_and_before_the_first_step(backend: Open, tmp_path: Path):
    parts = backend("smolvlm", 0)
    with pytest.raises(BackendError, match="already made"):
        parts.decoder.allocate(4)
    fresh = open_reference(parts.spec, make("smolvlm", tmp_path, 0)).decoder
    if "torch" not in parts.decoder.place():
        spec = compile_parts(tmp_path / "smolvlm-0", tmp_path / "parts")
        fresh = open_ov(spec, tmp_path / "parts").decoder
    with pytest.raises(BackendError, match="cache was not made"):
        fresh(step([Run(sequence(parts, 4), 0, [0])], [3]))
    assert fresh.block_bytes >= BLOCK


# ── that they agree ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", SEEDS)
def test_openvino_agrees_with_transformers_part_by_part(opened, kind: str, seed: int):
    ours, theirs = opened("ov", kind, seed), opened("reference", kind, seed)
    tiles = {"pixels": tiles_of(ours, 4, seed)}
    features = theirs.vision(tiles)
    np.testing.assert_allclose(ours.vision(tiles)["features"], features["features"], atol=TOLERANCE)
    found, expected = ours.projector(features), theirs.projector(features)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=TOLERANCE)
    embeddings = sequence(ours, 75, seed)
    assert np.array_equal(ours.table, theirs.table)
    np.testing.assert_allclose(
        whole(ours, embeddings, [2, 0, 11]), whole(theirs, embeddings, [2, 0, 11]), atol=TOLERANCE
    )
