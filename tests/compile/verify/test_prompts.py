"""What verification feeds: real text, odd lengths, odd pictures, and the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import make
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compile.verify import inputs, prompts_for
from triptych.compile.verify.prompts import MAX_IMAGE_TOKENS, describe
from triptych.core.spec import Modality, ModelSpec
from triptych.media.registry import BASE
from triptych.media.text import Text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Text]:
    folder: Path = make("llava-next", tmp_path_factory.getbasetemp(), 0)
    checkpoint = Checkpoint.open(folder)
    spec = family_of(checkpoint).read_spec(checkpoint)
    assert spec.image is not None
    return spec, Text.open(folder, placeholder=spec.image.placeholder)


def test_they_are_the_same_each_time(model: tuple[ModelSpec, Text]) -> None:
    first, second = prompts_for(*model), prompts_for(*model)

    assert [prompt.name for prompt in first] == [prompt.name for prompt in second]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        assert all((x.tiles == y.tiles).all() for x, y in zip(a.items, b.items, strict=True))


def test_they_are_texts_of_odd_lengths_and_pictures_alone_and_together(model: tuple[ModelSpec, Text]) -> None:
    found = prompts_for(*model)

    assert {1, 31, 32, 33, 65} <= {len(prompt) for prompt in found}
    assert {len(prompt.items) for prompt in found} == {0, 1, 2}
    seeing = [prompt for prompt in found if prompt.items]
    assert sum(map(len, seeing)) <= MAX_IMAGE_TOKENS
    assert all(item.tiles.std() > 10 for prompt in seeing for item in prompt.items)  # never a blank
    assert f"{len(seeing)} prompts with pictures" in describe(found)


def test_positions_before_a_pictures_rows_are_not_judged(model: tuple[ModelSpec, Text]) -> None:
    for prompt in prompts_for(*model):
        is_image = prompt.token_ids >= BASE[Modality.IMAGE]
        following = np.append(is_image[1:], False)

        np.testing.assert_array_equal(prompt.judged, np.flatnonzero(~following))
        assert len(prompt.token_ids) - 1 in prompt.judged


def test_pictures_have_odd_sides_and_the_packages_own_are_among_them() -> None:
    found = inputs.pictures()

    assert all(side % 2 for name in ("shapes", "noise", "strip") for side in found[name].shape[:2])
    assert len(found) > 3
