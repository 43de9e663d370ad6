"""What every family's pictures keep: count, prompt text and tiles tell the same story, and transformers' own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from triptych.core.chat import Chat, ImagePart, Message, TextPart
from triptych.core.spec import ImageSpec
from triptych.errors import MediaError
from triptych.media.image import at_detail, count, prepare, prompt_text, take
from triptych.media.text import Text

GRIDS = ((28, 56), (56, 28), (56, 56), (84, 28), (28, 84))
BASE = ImageSpec(tiling="one", tile_size=28, tokens_per_tile=16, resample="bicubic", placeholder="<image>")
IDEFICS3 = ImageSpec(
    tiling="split",
    tile_size=32,
    tokens_per_tile=4,
    resample="lanczos",
    longest_edge=128,
    placeholder="<image>",
    open_mark="<fake_token_around_image>",
    grid_mark="<row_{row}_col_{col}>",
    whole_mark="<global-img>",
)


def variant(spec: ImageSpec, **changes: object) -> ImageSpec:
    return ImageSpec(**({name: getattr(spec, name) for name in spec.__struct_fields__} | changes))  # type: ignore[arg-type]


SPECS = {
    "squash": BASE,
    "shortest_crop": variant(BASE, fit="shortest_crop"),
    "pad": variant(BASE, fit="pad", pad_rgb=(122, 116, 104)),
    "idefics3": IDEFICS3,
    "idefics3, odd edge": variant(IDEFICS3, tile_size=30, longest_edge=125),
    "idefics3, one tile": variant(IDEFICS3, longest_edge=32),
    "idefics3, not split": at_detail(IDEFICS3, "low"),
    "llava-next": variant(BASE, tiling="anyres", grids=GRIDS, row_rows=4, has_newline=True),
    "llava-next, no newline": variant(BASE, tiling="anyres", grids=GRIDS, row_rows=4),
    "llava-next, low detail": at_detail(
        variant(BASE, tiling="anyres", grids=GRIDS, row_rows=4, has_newline=True), "low"
    ),
}
SIDES = st.one_of(st.integers(1, 64), st.integers(1, 3000))


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=300, deadline=None)
@given(width=SIDES, height=SIDES)
@example(width=1, height=3000)
@example(width=3000, height=1)
@example(width=1, height=1)
@example(width=1093, height=5)
def test_counts_agree_for_every_size(name, width, height):
    spec = SPECS[name]
    try:
        num_tokens = count((width, height), spec)
    except MediaError as error:
        assert f"{width:,}×{height:,}" in error.message
        return
    text = prompt_text((width, height), spec)
    assert num_tokens == text.count(spec.placeholder) == len(take((width, height), spec))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [(1, 1), (1, 60), (90, 2), (40, 30), (31, 97), (128, 128), (200, 20)])
def test_the_tiles_hold_the_rows_that_are_taken(name, size):
    spec = SPECS[name]
    tiles, rows = prepare(Image.new("RGB", size, (9, 99, 199)), spec)
    num_extra = int(spec.has_newline)
    assert tiles.dtype == np.uint8
    assert tiles.shape[1:] == (spec.tile_size, spec.tile_size, 3)
    assert len(rows) == count(size, spec)
    assert 0 <= rows.min()
    assert rows.max() < len(tiles) * spec.tokens_per_tile + num_extra
