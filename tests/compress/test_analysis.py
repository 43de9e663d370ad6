"""The pieces of an analysis: rows that are dropped, losses, nearest words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from numpy_decoder import random_weights, spec_of
from triptych.backends.torch_graph import TorchPart
from triptych.compile.decoder import build
from triptych.compile.graph import Store
from triptych.compress.analysis import Job, analyze, nearest, reduced
from triptych.compress.loss import divergence
from triptych.compress.model import Model
from triptych.compress.report import PartBytes
from triptych.compress.samples import Sample
from triptych.core.policy import METHODS, Reduction
from triptych.core.spec import Modality

T, I = int(Modality.TEXT), int(Modality.IMAGE)  # noqa: E741
LAID_OUT = np.array([T, T, *[I] * 9, T, *[I] * 4, T, T, T], np.uint8)


def sample() -> Sample:
    size = len(LAID_OUT)
    return Sample(
        name="two pictures",
        token_ids=np.zeros(size, np.int32),
        embeddings=np.random.default_rng(0).standard_normal((size, 6)).astype(np.float32),
        modality=LAID_OUT,
        is_answer=np.arange(size) >= size - 2,
        tiles=np.zeros((2, 4, 4, 3), np.uint8),
        rows=np.arange(13, dtype=np.int32),
    )


@pytest.mark.parametrize("method", METHODS)
def test_each_run_keeps_its_share_and_all_text_stays_where_it_was(method):
    rows, positions = reduced(sample(), Reduction(method=method, keep=0.5))

    kept = LAID_OUT[positions]
    assert (kept == I).sum() == 4 + 2  # round(4.5) is 4
    assert ((positions >= 2) & (positions < 11)).sum() == 4
    assert positions[kept == T].tolist() == [0, 1, 11, 16, 17, 18]
    assert (np.diff(positions) > 0).all()
    np.testing.assert_array_equal(rows[kept == T], sample().embeddings[positions[kept == T]])


def test_a_whole_share_changes_nothing():
    rows, positions = reduced(sample(), Reduction(keep=1.0))
    np.testing.assert_array_equal(rows, sample().embeddings)
    np.testing.assert_array_equal(positions, np.arange(len(LAID_OUT)))


def test_the_divergence_is_that_of_its_formula():
    exact, tested = (torch.log_softmax(torch.tensor(one), -1) for one in ([[1.0, 2.0, 3.0]], [[3.0, 2.0, 1.0]]))
    nats, same = divergence(exact, tested)
    assert nats == pytest.approx(float((exact.exp() * (exact - tested)).sum()))
    assert same.tolist() == [False]
    assert divergence(exact, exact)[0] == pytest.approx(0.0)


def test_a_row_is_spelled_only_where_a_word_is_near():
    table = np.eye(4, dtype=np.float32)
    rows = np.array([[0, 5, 0, 0], [1, 1, 1, 1], [0.2, 0, 0.9, 0]], np.float32)
    assert nearest(rows, table) == [1, None, 2]


def test_a_text_model_is_analyzed_without_anything_between_modalities(tmp_path):
    spec = spec_of(tied=True)
    weights = random_weights(spec)
    table = weights["embed_tokens.weight"]
    part = TorchPart(build(spec, weights.__getitem__, Store("fp32")))
    ids = np.arange(12, dtype=np.int32)
    facts = {
        "modality": np.zeros(12, np.uint8),
        "tiles": np.empty((0, 0, 0, 3), np.uint8),
        "rows": np.empty(0, np.int32),
    }
    parts = [PartBytes(name=name, precision="fp32", num_parameters=1, num_bytes=4) for name in ("embedding", "decoder")]
    job = Job(
        name="text",
        fed="one text",
        parts=tuple(parts),
        model=Model({"decoder": part}, table.__getitem__),
        samples=[Sample(name="t", token_ids=ids, embeddings=table[ids], is_answer=ids > 7, **facts)],
        work=tmp_path / "work.json",
        spell=lambda rows: (),
    )

    found = analyze(job)

    assert {one.layer for one in found.sensitivities if one.part == "decoder"} == {"", "layers.0", "layers.1"}
    assert [layer.text_media for layer in found.layers] == [None, None]
    assert (found.proposed, found.points, found.glances) == (None, (), ())
