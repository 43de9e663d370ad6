"""triptych-mini: EfficientNet-Lite0, a projector of soft words, SmolLM2-135M-Instruct.

The folder is laid out by `compile/mini.py`: the decoder as one GGUF file, the vision panel under `panel/`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from triptych.compile import conv, softwords
from triptych.compile.checkpoint import Array, Checkpoint
from triptych.compile.families import text
from triptych.compile.families.layout import Layout, under
from triptych.compile.families.section import Section
from triptych.compile.families.tokens import added_token, eos_ids
from triptych.compile.graph import Weight
from triptych.core.quantized import Held, plain
from triptych.core.spec import ImageSpec, ModelSpec, ProjectorSpec, VisionSpec
from triptych.core.stored import PANEL

MODEL_TYPES = ("triptych_mini",)


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Raises CheckpointError naming what is not built."""
    config = Section("config.json", checkpoint.config)
    language = text.text_section(config.section("text_config"))
    decoder = text.read_decoder(language, tied=language.flag("tie_word_embeddings"))
    panel = config.section("vision_config")
    side, tokens = panel.integer("image_size"), panel.integer("num_visual_tokens")
    token_id = config.integer("image_token_id")
    vision = VisionSpec(
        kind="conv",
        image_size=side,
        num_tokens=panel.integer("num_cells"),
        hidden=panel.integer("feature_width"),
        mean=panel.triple("image_mean"),
        std=panel.triple("image_std"),
    )
    image = ImageSpec(
        tiling="one",
        tile_size=side,
        tokens_per_tile=tokens,
        resample="bicubic",
        fit="squash",
        placeholder=added_token(checkpoint, token_id),
    )
    return ModelSpec(
        family="mini",
        decoder=text.settle_head(checkpoint, decoder, "model.", "lm_head.weight"),
        vision=vision,
        projector=ProjectorSpec(kind="soft_words", num_tokens=tokens, hidden=decoder.hidden),
        image=image,
        eos_ids=eos_ids(checkpoint, language),
        image_token_id=token_id,
    )


def layout(checkpoint: Checkpoint, spec: ModelSpec) -> Layout:
    """The panel under `panel.`, the decoder as its family keeps it. Of words the file has the ids."""
    decoder = text.layout(checkpoint, spec)
    spoken = {name: f"ids.{name.removeprefix('words.')}" for name in softwords.names() if name.startswith("words.")}
    connector = {name: f"{PANEL}connector.{spoken.get(name, name)}" for name in softwords.names()}
    parts = {"vision": under(f"{PANEL}vision.", conv.names()), "projector": connector, **decoder.parts}
    return Layout(parts=parts, unused=decoder.unused)


def view(weights: dict[str, Weight]) -> dict[str, Weight]:
    """The connector's own tensors, and for the words that it says the decoder's rows."""
    table = cache(lambda: plain(weights["decoder"]("embed_tokens.weight")))

    def spoken(name: str) -> Held:
        held = weights["projector"](name)
        return looked_up(plain(held), table()) if name.startswith("words.") else held

    return {**weights, "projector": spoken}


def looked_up(ids: Array, table: Array) -> Array:
    """Rows of the decoder's table. Names (names, places) of ids, -1 where a place is free: (…, hidden + 1)."""
    rows = np.asarray(table[np.maximum(ids, 0)], np.float32)
    if ids.ndim < 2:
        return rows
    taken = (ids >= 0)[..., None].astype(np.float32)
    return np.concatenate([rows * taken, taken], -1)
