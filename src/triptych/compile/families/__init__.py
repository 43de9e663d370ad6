"""One file a model family: its names, its spec, its preprocessing facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import idefics3, llava, mini, text
from triptych.compile.families.layout import Layout
from triptych.compile.graph import Weight
from triptych.core.spec import ModelSpec
from triptych.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """read_spec: what the model is. layout: where the checkpoint keeps the tensors of each part ("vision", "projector",
    "decoder"), by the name that the part's `build` knows; the token table is the decoder's `embed_tokens.weight`.
    view: a part's tensors where they are not simply the checkpoint's own.
    """

    model_types: tuple[str, ...]
    read_spec: Callable[[Checkpoint], ModelSpec]
    layout: Callable[[Checkpoint, ModelSpec], Layout]
    view: Callable[[dict[str, Weight]], dict[str, Weight]] = lambda weights: weights

    def weights(self, checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Weight]:
        """Of each part, a tensor by its own name. Raises CheckpointError for one that is missing or left over."""
        return self.view(self.layout(checkpoint, spec).weights(checkpoint))


FAMILIES = (
    Family(model_types=idefics3.MODEL_TYPES, read_spec=idefics3.read_spec, layout=idefics3.layout),
    Family(model_types=llava.MODEL_TYPES, read_spec=llava.read_spec, layout=llava.layout),
    Family(model_types=mini.MODEL_TYPES, read_spec=mini.read_spec, layout=mini.layout, view=mini.view),
    Family(model_types=text.MODEL_TYPES, read_spec=text.read_spec, layout=text.layout),
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
