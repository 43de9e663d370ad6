"""Where a checkpoint keeps each part's tensors; none may be missing and none left over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from triptych.compile.checkpoint import Checkpoint
from triptych.compile.graph import Weight
from triptych.core.quantized import Held
from triptych.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """parts: of each part, its own name of a tensor → the checkpoint's. unused: known, and doing nothing here."""

    parts: Mapping[str, Mapping[str, str]]
    unused: frozenset[str] = field(default_factory=frozenset)

    def weights(self, checkpoint: Checkpoint) -> dict[str, Weight]:
        """Of each part, a tensor by its own name. Raises CheckpointError when the checkpoint is not this layout."""
        here = checkpoint.names()
        wanted = {name for names in self.parts.values() for name in names.values()}
        missing, extra = sorted(wanted - here), sorted(here - wanted - self.unused)
        if missing:
            raise CheckpointError(
                f"{checkpoint.folder} lacks {_few(missing)}",
                hint=f"it has {_few(extra)} besides" if extra else "download the model again",
            )
        if extra:
            raise CheckpointError(
                f"{checkpoint.folder} holds {_few(extra)}, which this family does not use",
                hint="the model may have parts that its config.json does not tell of; they would be lost",
            )
        return {part: _weight(checkpoint, part, names) for part, names in self.parts.items()}


def prefix(checkpoint: Checkpoint, probe: str, candidates: Sequence[str]) -> str:
    """The first of `candidates` under which the checkpoint keeps the tensor `probe`. Raises CheckpointError."""
    here = checkpoint.names()
    for candidate in candidates:
        if candidate + probe in here:
            return candidate
    tried = ", ".join(candidate + probe for candidate in candidates)
    raise CheckpointError(f"{checkpoint.folder} has none of the tensors {tried}")


def under(start: str, names: Iterable[str]) -> dict[str, str]:
    """Own name → the checkpoint's, for tensors that lie together under one prefix."""
    return {name: start + name for name in names}


def _weight(checkpoint: Checkpoint, part: str, names: Mapping[str, str]) -> Weight:
    def weight(name: str) -> Held:
        if name not in names:
            raise CheckpointError(f"the {part} asked for {name}, which its family does not place")
        return checkpoint.held(names[name])

    return weight


def _few(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more:,} more" if more > 0 else "")
