"""One file a model family: its names, its spec, its preprocessing facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import idefics3, llava, mini, text
from triptych.compile.graph import Weight
from triptych.core.spec import ModelSpec
from triptych.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """read_spec: what the model is. weights: of each part ("vision", "projector", "decoder"), a tensor by the name
    that part's `build` knows; the token table is the decoder's `embed_tokens.weight`. Both raise CheckpointError.
    """

    model_types: tuple[str, ...]
    read_spec: Callable[[Checkpoint], ModelSpec]
    weights: Callable[[Checkpoint, ModelSpec], dict[str, Weight]]


FAMILIES = (
    Family(model_types=idefics3.MODEL_TYPES, read_spec=idefics3.read_spec, weights=idefics3.weights),
    Family(model_types=llava.MODEL_TYPES, read_spec=llava.read_spec, weights=llava.weights),
    Family(model_types=mini.MODEL_TYPES, read_spec=mini.read_spec, weights=mini.weights),
    Family(model_types=text.MODEL_TYPES, read_spec=text.read_spec, weights=text.weights),
)


def family_of(checkpoint: Checkpoint) -> Family:
    """The family that reads this checkpoint. Raises CheckpointError that lists the known ones."""
    found = checkpoint.config.get("model_type")
    for family in FAMILIES:
        if found in family.model_types:
            return family
    known = ", ".join(model_type for family in FAMILIES for model_type in family.model_types)
    raise CheckpointError(
        f"{checkpoint.folder}: no family reads model type {found!r}", hint=f"the known ones are {known}"
    )
