"""A tiny checkpoint compressed by plain rounding, with what was asked of each weight; no calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from checkpoints import make
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compress.check import Wanted, check_folder
from triptych.compress.rounding import Grid, round_weight
from triptych.compress.write import Beside, Source, write_checkpoint
from triptych.core.bundle import Compression, Evidence, Measure, Step
from triptych.core.policy import KVPolicy
from triptych.core.quantized import Quantized
from triptych.core.stored import scheme_of

STEP = Step(stage="compress", version="0", inputs_digest="a", outputs_digest="b")
EVIDENCE = Evidence(subject="whole", twin="fp32", inputs="a test", measures=(Measure(name="kl", value=0.1),))
BESIDE = Beside(
    compression=Compression(recipe="test", step=STEP, evidence=(EVIDENCE,), kv_policy=KVPolicy(statistics="kv.npz")),
    files={"kv.npz": b"statistics"},
)
TABLES = ("embed_tokens.weight", "lm_head.weight")
WIDTHS = dict.fromkeys(TABLES, 8) | {"o_proj.weight": 8, "gate_proj.weight": 6, "up_proj.weight": 5}  # of a decoder


@dataclass(frozen=True)
class Compressed:
    """A source, what took its tensors' places by part and checkpoint name, and what was asked."""

    source: Source
    changes: Mapping[str, Mapping[str, Quantized]]

    @property
    def asked(self) -> dict[str, dict[str, Wanted]]:
        return {
            part: {name: Wanted(schemes=frozenset({scheme_of(held)})) for name, held in tensors.items()}
            for part, tensors in self.changes.items()
        }

    def write(self, target: Path) -> Path:
        write_checkpoint(self.source, target, self.changes, BESIDE)
        return target

    def check(self, folder: Path) -> None:
        check_folder(folder, self.source, self.changes, self.asked)


def compress(kind: str, folder: Path) -> Compressed:
    """decoder: 4 bits in groups, some 5, 6 and 8; projector: 3 bits in groups; vision: 8 bits with rounded inputs, its
    first kernel too; table and head: 8 bits."""
    checkpoint = Checkpoint.open(make(kind, folder, 0))
    family = family_of(checkpoint)
    layout = family.layout(checkpoint, family.read_spec(checkpoint))
    changes: dict[str, dict[str, Quantized]] = {}
    for part, names in layout.parts.items():
        for own, name in names.items():
            values = checkpoint.tensor(name)
            if values.ndim < 2 or "position" in own:
                continue
            is_table = own in TABLES
            changes.setdefault("embedding" if is_table else part, {})[name] = _rounded(part, own, values)
    return Compressed(Source(folder=checkpoint.folder, config=checkpoint.config, tensors=checkpoint.tensors), changes)


def _rounded(part: str, own: str, values: np.ndarray) -> Quantized:
    numbers = torch.from_numpy(values.astype(np.float32)).flatten(1)
    bits = {"decoder": 4, "projector": 3, "vision": 8}[part]
    if part == "decoder":
        bits = next((bits for ending, bits in WIDTHS.items() if own.endswith(ending)), bits)
    size = None if own in TABLES or part == "vision" else 16
    grid = Grid(bits=bits, group_size=size, scale_type=str(values.dtype))
    held = replace(round_weight(numbers, grid), shape=values.shape)
    return replace(held, input_scale=2.0**-5) if part == "vision" else held


def edited(folder: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the tensors of a folder's main file as it lies on disk."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
