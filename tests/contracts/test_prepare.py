"""What every family's pictures keep: count, prompt text and tiles tell the same story, and transformers' own."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from triptych.core.chat import Chat, ImagePart, Message, TextPart
from triptych.core.spec import ImageSpec
from triptych.errors import MediaError
from triptych.media.image import at_detail, count, num_bytes, prepare, prompt_text, runs, take
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
    "llava-next": variant(BASE, tiling="anyres", grids=GRIDS, has_newline=True),
    "llava-next, no newline": variant(BASE, tiling="anyres", grids=GRIDS),
    "llava-next, low detail": at_detail(variant(BASE, tiling="anyres", grids=GRIDS, has_newline=True), "low"),
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
    size = (width, height)
    if is_showable(size, spec):
        assert count(size, spec) == prompt_text(size, spec).count(spec.placeholder) == len(take(size, spec))
    else:
        with pytest.raises(MediaError, match=f"{width:,}×{height:,}"):
            count(size, spec)


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=100, deadline=None)
@given(width=SIDES, height=SIDES)
def test_runs_hold_every_token_and_no_mark_stands_within_one(name, width, height):
    spec, size = SPECS[name], (width, height)
    if not is_showable(size, spec):
        return
    lengths = runs(size, spec)
    text = prompt_text(size, spec)
    together = [len(found) // len(spec.placeholder) for found in re.findall(f"(?:{spec.placeholder})+", text)]
    assert sum(lengths) == count(size, spec)
    assert set(np.cumsum(together)) <= set(np.cumsum(lengths))


def is_showable(size: tuple[int, int], spec: ImageSpec) -> bool:
    """A very long picture is not scaled whole to be cropped to its middle."""
    return spec.fit != "shortest_crop" or spec.tile_size**2 * max(size) / min(size) <= 64_000_000


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [(1, 1), (1, 60), (90, 2), (40, 30), (31, 97), (128, 128), (200, 20)])
def test_the_tiles_hold_the_rows_that_are_taken(name, size):
    spec = SPECS[name]
    tiles, rows = prepare(Image.new("RGB", size, (9, 99, 199)), spec)
    num_extra = int(spec.has_newline)
    assert tiles.dtype == np.uint8
    assert tiles.shape[1:] == (spec.tile_size, spec.tile_size, 3)
    assert len(rows) == count(size, spec)
    assert rows.min() >= 0
    assert rows.max() < len(tiles) * spec.tokens_per_tile + num_extra
    assert num_bytes(size, spec) == tiles.nbytes


# ── against transformers ────────────────────────────────────────────────────────────────────────────────────────

KINDS = ("smolvlm", "smolvlm-whole", "idefics3", "llava", "llava-qwen2", "llava-next")
SIZES = [(40, 30), (1, 1), (2, 95), (95, 2), (28, 28), (29, 57), (131, 33), (33, 131), (127, 128), (640, 427), (300, 4)]
QUESTION = "What is this? 12 cats, 🍎 naß\n  <b>"


@lru_cache(maxsize=len(KINDS))
def opened(kind: str, folder: Path):
    import checkpoints
    from triptych.compile.checkpoint import Checkpoint
    from triptych.compile.families import family_of

    path = checkpoints.make(kind, folder, 0)
    spec = family_of(Checkpoint.open(path)).read_spec(Checkpoint.open(path))
    assert spec.image is not None
    assert spec.vision is not None
    return path, spec, Text.open(path, eos_ids=spec.eos_ids, placeholder=spec.image.placeholder)


@pytest.mark.reference
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_prompt_are_those_of_transformers(kind, size, tmp_path_factory):
    import checkpoints

    path, spec, text = opened(kind, tmp_path_factory.getbasetemp())
    picture = checkpoints.picture(*size)
    expected = checkpoints.reference_inputs(path, [checkpoints.user(QUESTION, num_images=1)], [picture])

    tiles, _ = prepare(picture, spec.image)
    chat = Chat(messages=(Message(role="user", parts=(ImagePart(source=b""), TextPart(text=QUESTION))),))
    ids = text.encode_chat(chat, [prompt_text(size, spec.image)])

    assert ids == expected.input_ids.tolist()
    assert np.array_equal(tiles, checkpoints.as_pixels(expected.pixel_values, spec.vision.mean, spec.vision.std))


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS)
def test_several_pictures_and_turns_are_tokenized_as_transformers_does(kind, tmp_path_factory):
    import checkpoints

    path, spec, text = opened(kind, tmp_path_factory.getbasetemp())
    pictures = [checkpoints.picture(50, 20), checkpoints.picture(20, 90, seed=1), checkpoints.picture(64, 64, seed=2)]
    said = [checkpoints.user("First.", num_images=2), checkpoints.assistant("Yes?"), checkpoints.user("", num_images=1)]
    expected = checkpoints.reference_inputs(path, said, pictures)

    image = ImagePart(source=b"")
    messages = (
        Message(role="user", parts=(image, image, TextPart(text="First."))),
        Message(role="assistant", parts=(TextPart(text="Yes?"),)),
        Message(role="user", parts=(image, TextPart(text=""))),
    )
    ids = text.encode_chat(Chat(messages=messages), [prompt_text(picture.size, spec.image) for picture in pictures])

    assert ids == expected.input_ids.tolist()


REAL_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
SMOLVLM = variant(IDEFICS3, tile_size=512, longest_edge=2048)
IDEFICS3_8B = variant(IDEFICS3, tile_size=364, longest_edge=4 * 364)


@pytest.mark.reference
@pytest.mark.parametrize("spec", [SMOLVLM, IDEFICS3_8B, IDEFICS3], ids=["SmolVLM", "Idefics3", "tiny"])
@settings(max_examples=400, deadline=None)
@given(width=SIDES, height=SIDES)
def test_the_grid_is_that_of_transformers_for_every_size(spec, width, height):
    from transformers.models.idefics3 import image_processing_pil_idefics3 as theirs

    class Sizes(theirs.Idefics3ImageProcessorPil):
        """Their arithmetic on arrays that have a shape and no pixels."""

        def resize(self, image, size, **kwargs):
            if size.longest_edge:
                edges = theirs.get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
            else:
                edges = size.height, size.width
            return np.broadcast_to(np.uint8(0), (3, *edges))

    processor = Sizes(size={"longest_edge": spec.longest_edge}, max_image_size={"longest_edge": spec.tile_size})
    picture = processor.resize(np.broadcast_to(np.uint8(0), (3, height, width)), processor.size)
    picture = processor.resize_for_vision_encoder(picture, spec.tile_size)
    tiles, rows, columns = processor.split_images(picture, {"longest_edge": spec.tile_size})

    assert count((width, height), spec) == len(tiles) * spec.tokens_per_tile
    text = prompt_text((width, height), spec)
    assert text.count("<row_") == rows * columns
    assert f"<row_{rows}_col_{columns}>" in text or not rows


@pytest.mark.reference
@settings(max_examples=400, deadline=None)
@given(width=SIDES, height=SIDES)
@example(width=1, height=3000)
@example(width=2000, height=30)
def test_the_unpadded_rows_are_as_many_as_transformers_counts_and_its_model_packs(width, height):
    from types import SimpleNamespace

    import torch
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    side = 24
    spec = variant(BASE, tiling="anyres", tile_size=336, tokens_per_tile=side**2, grids=REAL_GRIDS, has_newline=True)
    grids = [list(grid) for grid in REAL_GRIDS]
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=grids), patch_size=14, num_additional_image_tokens=0
    )
    processor._get_unpadded_features = LlavaNextProcessor._get_unpadded_features.__get__(processor)
    assert count((width, height), spec) == LlavaNextProcessor._get_number_of_features(
        processor, height, width, 336, 336
    )

    rows = take((width, height), spec)
    num_tiles = image_size_to_num_patches([height, width], grids, 336)
    features = torch.arange(num_tiles * side**2, dtype=torch.float32).reshape(num_tiles, side**2, 1)
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(image_size=336, patch_size=14), image_grid_pinpoints=grids)
    )
    newline = torch.tensor([float(num_tiles * side**2)])
    packed, _ = LlavaNextModel.pack_image_features(model, [features], [[height, width]], "full", newline)
    assert np.array_equal(packed[0][:, 0].numpy(), rows)


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(said=st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_clean_text_is_tokenized_as_transformers_does(kind, said, tmp_path_factory):
    import checkpoints

    path, _, text = opened(kind, tmp_path_factory.getbasetemp())
    roles = ["user", "assistant", "user"][: len(said)]
    theirs = [
        {"role": role, "content": [{"type": "text", "text": words}]} for role, words in zip(roles, said, strict=True)
    ]
    expected = checkpoints.reference_inputs(path, theirs, [])

    messages = [Message(role=role, parts=(TextPart(text=words),)) for role, words in zip(roles, said, strict=True)]
    chat = Chat(messages=tuple(messages))

    assert text.render(chat).plain == expected.prompt
    assert text.encode_chat(chat) == expected.input_ids.tolist()
