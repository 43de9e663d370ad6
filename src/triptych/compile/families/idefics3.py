"""Idefics3 and SmolVLM: SigLIP, pixel shuffle, Llama; pictures in tiles (arXiv:2408.12637)."""

from __future__ import annotations

import msgspec

from triptych.compile import projector, vit
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import text, tower
from triptych.compile.families.layout import Layout, under
from triptych.compile.families.preprocessor import HALF, RESAMPLE, edge, read_preprocessor
from triptych.compile.families.section import Section
from triptych.compile.families.tokens import added_token, eos_ids
from triptych.core.spec import ImageSpec, ModelSpec, ProjectorSpec, VisionSpec
from triptych.errors import CheckpointError

MODEL_TYPES = ("idefics3", "smolvlm")
DEFAULTS = {"image_token_id": 128257, "scale_factor": 2}
_IMAGE = {
    "resample": 1,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    "do_pad": True,
    "image_mean": HALF,
    "image_std": HALF,
}
PROCESSORS = {"Idefics3ImageProcessor": _IMAGE, "SmolVLMImageProcessor": _IMAGE}
TEXT, VISION, PROJECTOR = "model.text_model.", "model.vision_model.", "model.connector.modality_projection."
HEAD = "lm_head.weight"

# transformers finds a patch's position by float32 buckets. They give every patch its own place for the sides that
# models have (26, 27, 32), but for some sides rounding puts patches in a neighbour's, differently from one
# processor to another (`tests/compile/test_families.py` recomputes this).
MOST_SIDE = 64
ROUNDED_SIDES = frozenset({19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62})


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Raises CheckpointError naming what is not built."""
    config = Section("config.json", checkpoint.config, DEFAULTS)
    language = text.text_section(config.section("text_config"))
    tied = config.flag("tie_word_embeddings") or language.flag("tie_word_embeddings")
    decoder = text.read_decoder(language, tied=tied)
    pictures = read_preprocessor(checkpoint, PROCESSORS)
    vision = _vision(config, pictures)
    shuffle, side = config.integer("scale_factor"), vision.image_size // vision.patch
    if side % shuffle:
        raise CheckpointError(f"config.json: scale_factor {shuffle} does not divide {side} patches a side")
    num_tokens = (side // shuffle) ** 2
    token_id = config.integer("image_token_id")
    return ModelSpec(
        family="idefics3",
        decoder=text.settle_head(checkpoint, decoder, TEXT, HEAD),
        vision=vision,
        projector=ProjectorSpec(
            kind="pixel_shuffle", num_tokens=num_tokens, hidden=decoder.hidden, shuffle=shuffle, bias=False
        ),
        image=_image(pictures, vision, num_tokens, added_token(checkpoint, token_id)),
        eos_ids=eos_ids(checkpoint, language),
        image_token_id=token_id,
    )


def layout(checkpoint: Checkpoint, spec: ModelSpec) -> Layout:
    """Where every tensor of the checkpoint belongs."""
    assert spec.vision is not None
    assert spec.projector is not None
    section = _vision_section(Section("config.json", checkpoint.config))
    return Layout(
        parts={
            "vision": under(VISION, vit.names(spec.vision)),
            "projector": under(PROJECTOR, projector.names(spec.projector)),
            "decoder": text.decoder_names(spec.decoder, TEXT, HEAD),
        },
        unused=tower.unused(section, spec.vision, VISION) | text.unused(spec.decoder, TEXT, HEAD),
    )


def _vision_section(config: Section) -> Section:
    """Old configs name the tower's model type in several ways; it is always the same tower."""
    return config.section("vision_config", tower.DEFAULTS["idefics3_vision"]).over({"model_type": "idefics3_vision"})


def _vision(config: Section, pictures: Section) -> VisionSpec:
    section = _vision_section(config)
    spec = tower.read_tower(section, feature_layer=-1, first_row=0, colours=pictures)
    side = spec.image_size // spec.patch
    if side > MOST_SIDE or side in ROUNDED_SIDES:
        raise CheckpointError(
            f"{section.where}: {side} patches a side; transformers rounds their positions, and not alike everywhere",
            hint=f"sides up to {MOST_SIDE} are read but for {sorted(ROUNDED_SIDES)}",
        )
    return msgspec.structs.replace(spec, post_norm=True)


def _image(pictures: Section, vision: VisionSpec, num_tokens: int, placeholder: str) -> ImageSpec:
    tile = edge(pictures, "max_image_size", "longest_edge")
    if tile != vision.image_size:
        raise CheckpointError(
            f"{pictures.where}: tiles of {tile} pixels for a tower of {vision.image_size}; they must be equal"
        )
    longest = edge(pictures, "size", "longest_edge")
    if longest is None:
        raise pictures.wrong("size", "an object with longest_edge")
    return ImageSpec(
        tiling="split" if pictures.flag("do_image_splitting") else "one",
        tile_size=tile,
        tokens_per_tile=num_tokens,
        resample=pictures.one_of("resample", RESAMPLE),
        longest_edge=longest,
        placeholder=placeholder,
        open_mark="<fake_token_around_image>",
        grid_mark="<row_{row}_col_{col}>",
        whole_mark="<global-img>",
    )
