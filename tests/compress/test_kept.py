"""Finished work is known by all that it depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.compress.test_calibrate import mixed

from triptych.compress import kept
from triptych.compress.kept import digest
from triptych.compress.samples import Sample

SAMPLE = replace(mixed(0), tiles=np.zeros((1, 4, 4, 3), np.uint8), rows=np.zeros(5, np.int32))


@pytest.mark.parametrize("name", ["token_ids", "embeddings", "modality", "is_answer", "tiles", "rows"])
def test_any_number_of_a_sample_counts(name):
    array = getattr(replace(SAMPLE, embeddings=np.zeros((12, 3), np.float32)), name).copy()
    first = replace(SAMPLE, **{name: array})
    other = array.copy()
    other.flat[-1] = not other.flat[-1]

    assert digest([first]) == digest([replace(first, **{name: array.copy()})])
    assert digest([first]) != digest([replace(first, **{name: other})])


def test_order_and_number_of_samples_count_but_not_their_names():
    other: Sample = mixed(1)

    assert digest([SAMPLE]) == digest([replace(SAMPLE, name="renamed")])
    assert len({digest([SAMPLE]), digest([other]), digest([SAMPLE, other]), digest([other, SAMPLE])}) == 4


def test_the_code_counts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(kept, "__file__", str(tmp_path / "kept.py"))
    (tmp_path / "gptq.py").write_text("DAMPING = 1.0\n")
    before = digest([SAMPLE])

    (tmp_path / "gptq.py").write_text("DAMPING = 2.0\n")

    assert digest([SAMPLE]) != before
