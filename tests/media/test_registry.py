"""Global ids are disjoint, spans follow the runs, digests see every difference."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.policy import Reduction
from triptych.core.request import Patches
from triptych.core.spec import Modality
from triptych.media.registry import AUDIO_BASE, END, IMAGE_BASE, VIDEO_BASE, DigestFacts, digest, modality_of, place
from triptych.testing import picture

FACTS = DigestFacts(
    modality=Modality.IMAGE,
    content_sha256="c" * 64,
    geometry=(640, 480),
    settings="{}",
    weights_digest="w",
    tenant="",
)


def test_every_global_id_has_one_owner():
    ids = np.array([0, IMAGE_BASE - 1, IMAGE_BASE, AUDIO_BASE - 1, AUDIO_BASE, VIDEO_BASE, END - 1], np.int32)
    text, image, audio, video = Modality
    assert modality_of(ids).tolist() == [text, text, image, image, audio, video, video]
    for stranger in (-1, END):
        with pytest.raises(ValueError, match="global ids lie in"):
            modality_of(np.array([stranger], np.int32))


@given(
    st.lists(
        st.one_of(st.integers(0, 900), st.builds(picture, st.integers(0, 255), num_tiles=st.integers(1, 3))),
        max_size=20,
    )
)
def test_placing_gives_each_placeholder_its_row_in_order(parts):
    placeholder = 999
    items = [part for part in parts if not isinstance(part, int)]
    text = []
    for part in parts:
        text += [part] if isinstance(part, int) else [placeholder] * part.num_tokens
    placed = place(text, placeholder, items)
    ids, spans = placed.token_ids, placed.spans
    assert placed.positions is None
    assert len(ids) == len(text)
    rows = [row for item in items for row in range(item.num_tokens)]
    assert (ids[ids >= IMAGE_BASE] - IMAGE_BASE).tolist() == rows
    assert sum(span.num_tokens for span in spans) == len(rows)
    covered = {position for span in spans for position in range(span.start, span.end)}
    assert covered == set(np.flatnonzero(np.array(text, int) == placeholder).tolist())


def test_a_picture_with_marks_between_its_tiles_has_a_span_for_each_run():
    placed = place([5, 9, 9, 9, 9, 6, 9, 9, 9, 9, 7], 9, [picture(1, num_tiles=2)])
    ids, spans = placed.token_ids, placed.spans
    assert [(span.start, span.num_tokens) for span in spans] == [(1, 4), (6, 4)]
    assert len({span.digest for span in spans}) == 1
    assert ids[6] == IMAGE_BASE + 4


def test_neighbouring_pictures_have_spans_of_their_own():
    spans = place([9] * 8, 9, [picture(1), picture(2)]).spans
    assert [(span.start, span.digest) for span in spans] == [(0, "1x1"), (4, "2x1")]


@given(
    st.lists(st.one_of(st.integers(0, 900), st.lists(st.integers(1, 6), min_size=1, max_size=3)), max_size=12),
    st.sampled_from([0.1, 0.5, 0.7]),
)
def test_a_reduced_prompt_is_the_whole_one_with_gaps(parts, keep):
    """Against a list of (id, position) made token by token; marks stand between the runs of an item."""
    text, plain, items = [], [], []
    for part in parts:
        if isinstance(part, int):
            plain.append((part, len(text)))
            text.append(part)
            continue
        item = reduced(sum(part), tuple(part), keep)
        items.append(item)
        row = before = 0
        for run in part:
            for slot in range(item.reduction.count(run)):
                plain.append((IMAGE_BASE + row + slot, len(text) - before))
            row, before = row + item.reduction.count(run), before + run
            plain.append((950, len(text) + run))
            text += [999] * run + [950]
    placed = place(text, 999, items)
    assert placed.token_ids.tolist() == [token for token, _ in plain]
    positions = range(len(text)) if placed.positions is None else placed.positions.tolist()
    if placed.positions is not None:
        assert list(positions) == [position for _, position in plain]
    shown = [position for span in placed.spans for position in range(span.start, span.end)]
    assert shown == np.flatnonzero(placed.token_ids >= IMAGE_BASE).tolist()


def reduced(num_rows: int, runs: tuple[int, ...], keep: float) -> Patches:
    return Patches(
        digest=str(runs), modality=Modality.IMAGE, tiles=np.zeros((1, 1, 1, 3), np.uint8),
        take=np.arange(num_rows, dtype=np.int32), reduction=Reduction(keep=keep), runs=runs,
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"modality": Modality.VIDEO},
        {"content_sha256": "d" * 64},
        {"geometry": (480, 640)},
        {"settings": '{"size":1}'},
        {"weights_digest": "v"},
        {"tenant": "t"},
    ],
)
def test_any_difference_gives_another_digest(change):
    assert digest(msgspec.structs.replace(FACTS, **change)) != digest(FACTS)
    assert len(digest(FACTS)) == 64
