"""What was asked of a compilation, and what tells one result from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import openvino as ov

from triptych.compile.graph import Store
from triptych.core.bundle import Precision
from triptych.errors import ConfigError

Choice = Precision | Literal["stored"]  # a precision to try; stored: as a compressed checkpoint has it
PARTS = ("vision", "projector", "decoder", "embedding")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TABLE_TYPES: dict[Any, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
READ = ("*.json", "*.jinja", "*.safetensors", "*.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """What was asked. auto: of each part the smallest precision that meets its gates, or as a compressed checkpoint
    has it. Raises ConfigError.
    """

    weights: Literal["auto"] | Precision = "auto"
    parts: Mapping[str, Precision] = field(default_factory=dict)  # these parts alone; the others follow `weights`
    verify: Literal["graph", "reference"] = "graph"
    group_size: int = 64  # weights that share a scale in int4

    def __post_init__(self) -> None:
        if self.weights not in ("auto", *PRECISIONS):
            raise ConfigError(f"weights {self.weights!r}", hint=f"choose auto, {', '.join(PRECISIONS)}")
        if self.verify not in ("graph", "reference"):
            raise ConfigError(f"verify {self.verify!r}", hint="choose graph or reference")
        for part, precision in self.parts.items():
            if part not in PARTS:
                raise ConfigError(f"parts names {part!r}", hint=f"the parts are {', '.join(PARTS)}")
            allowed = PRECISIONS if part != "embedding" else tuple(TABLE_TYPES.values())
            if precision not in allowed:
                raise ConfigError(f"{part} in {precision!r}", hint=f"it can be held in {', '.join(allowed)}")
        Store("fp32", group_size=self.group_size)  # refuses a size that cannot be

    def is_free(self, part: str) -> bool:
        """Whether the part's precision is ours to choose."""
        return part not in self.parts and self.weights == "auto"

    def candidates(self, part: str, half: Precision) -> tuple[Precision, ...]:
        """The precisions to try, smallest first; `half` is the 16-bit type nearest to the checkpoint's own."""
        if part in self.parts:
            return (self.parts[part],)
        return ("int4", "int8", half, "fp32") if self.weights == "auto" else (self.weights,)


def fingerprint(checkpoint: Path, config: CompileConfig) -> str:
    """Tells whether a compiled copy is still that of this folder and these wishes; reads no weights. 64 hex digits."""
    stats = {str(path): path.stat() for path in files_of(checkpoint)}
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    asked = [config.weights, sorted(config.parts.items()), config.verify, config.group_size]
    facts = [files, asked, version("triptych"), ov.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Of a checkpoint, also those that a family keeps one folder down."""
    return sorted(path for pattern in READ for path in [*folder.glob(pattern), *folder.glob(f"*/{pattern}")])
