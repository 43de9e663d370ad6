"""triptych-mini: EfficientNet-Lite0, a projector of soft words, SmolLM2-135M-Instruct.

The folder is laid out by `compile/mini.py`: the decoder as one GGUF file, the vision panel under `panel/`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from safetensors.numpy import load_file

from triptych.compile import conv, softwords
from triptych.compile.checkpoint import Array, Checkpoint
from triptych.compile.families import text
from triptych.compile.families.section import Section
from triptych.compile.families.tokens import added_token, eos_ids
from triptych.compile.graph import Weight
from triptych.core.spec import ImageSpec, ModelSpec, ProjectorSpec, VisionSpec
from triptych.errors import CheckpointError

MODEL_TYPES = ("triptych_mini",)
PANEL = "panel"
TABLE = "model.embed_tokens.weight"


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


def weights(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Weight]:
    """Of each part, a tensor by its own name. Raises CheckpointError for one that is missing or left over."""
    vision, connector = (_tensors(checkpoint, f"{name}.safetensors") for name in ("vision", "connector"))
    words = {f"words.{name.removeprefix('ids.')}": ids for name, ids in connector.items() if name.startswith("ids.")}
    learned = {name: value for name, value in connector.items() if not name.startswith("ids.")}
    _exactly(checkpoint, "vision", set(vision), set(conv.names()))
    _exactly(checkpoint, "connector", set(learned | words), set(softwords.names()))
    return {
        "vision": _weight(vision),
        "projector": _spoken(learned, words, cache(lambda: checkpoint.tensor(TABLE))),
        **text.weights(checkpoint, spec),
    }


def looked_up(ids: Array, table: Array) -> Array:
    """Rows of the decoder's table. Names (names, places) of ids, -1 where a place is free: (…, hidden + 1)."""
    rows = np.asarray(table[np.maximum(ids, 0)], np.float32)
    if ids.ndim < 2:
        return rows
    taken = (ids >= 0)[..., None].astype(np.float32)
    return np.concatenate([rows * taken, taken], -1)


def _spoken(learned: dict[str, Array], words: dict[str, Array], table: Callable[[], Array]) -> Weight:
    """The connector's own tensors, and the decoder's rows for the words it says."""

    def weight(name: str) -> Array:
        return learned[name] if name in learned else looked_up(words[name], table())

    return weight


def _weight(tensors: dict[str, Array]) -> Weight:
    return lambda name: tensors[name]


def _tensors(checkpoint: Checkpoint, name: str) -> dict[str, Array]:
    path = checkpoint.folder / PANEL / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", hint="delete the folder: triptych assembles it anew")
    tensors: dict[str, Array] = load_file(path)
    return tensors


def _exactly(checkpoint: Checkpoint, name: str, found: set[str], wanted: set[str]) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        where = checkpoint.folder / PANEL / f"{name}.safetensors"
        raise CheckpointError(f"{where} lacks {missing[:3]} and holds {extra[:3]}, which this version does not know")
