"""Read a model folder: config.json and safetensors, plain or in few bits, or one GGUF file."""

from __future__ import annotations

import difflib
import json
import math
import mmap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from triptych.compile import lowbit
from triptych.compile.gguf import GgufFile
from triptych.core.quantized import Held, plain
from triptych.core.stored import OWN, PANEL, Read
from triptych.errors import CheckpointError

Array = NDArray[Any]
Raw = Callable[[], Array]  # a tensor of the file, before it is read

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class Checkpoint:
    """A folder's config and tensors; a tensor is read when asked for, safetensors without a copy.

    What several tensors of the file stand for is one here: a weight in low bits. `remarks`: what could not be so read.
    """

    def __init__(
        self, folder: Path, config: dict[str, Any], tensors: Mapping[str, Read], remarks: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self.remarks = remarks

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """A folder, or a GGUF file. Raises CheckpointError when it is not whole."""
        folder = path if path.is_dir() else path.parent
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        if path.is_file() and path.suffix != ".gguf":
            raise CheckpointError(f"{path} is not a model folder", hint="give the folder that holds config.json")
        files = [path] if path.is_file() else _model_files(folder)
        if files[0].suffix == ".gguf":
            gguf = GgufFile(files[0])
            config = json_object(folder / "config.json") if (folder / "config.json").is_file() else gguf.config
            tensors: dict[str, Read] = {name: partial(gguf.read, tensor) for name, tensor in gguf.tensors.items()}
            return cls(folder, config, tensors | _own(folder), gguf.remarks())
        raw = _raw(files[0])
        config = json_object(folder / "config.json")
        return cls(folder, config, lowbit.gathered(config, raw) | _own(folder))

    @property
    def is_compressed(self) -> bool:
        """Whether its maker chose each weight's precision: compiled by `auto` it keeps them all."""
        return self.config.get("quantization_config") is not None or (self.folder / OWN).is_dir()

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def held(self, name: str) -> Held:
        """A tensor as it is stored, read-only; GGUF's uneven block formats as f32. Raises CheckpointError."""
        if name not in self.tensors:
            near = difflib.get_close_matches(name, self.tensors, n=3)
            hint = f"it has {', '.join(near)}" if near else f"none of its {len(self.tensors):,} tensors is like it"
            raise CheckpointError(f"{self.folder} has no tensor {name}", hint=hint)
        return self.tensors[name]()

    def tensor(self, name: str) -> Array:
        """The numbers themselves: f32 of what is stored in low bits. Raises CheckpointError."""
        return plain(self.held(name))


def _model_files(folder: Path) -> list[Path]:
    """The one file to start from: the index, the single file, or the only GGUF."""
    for name in (INDEX, SINGLE):
        if (folder / name).is_file():
            return [folder / name]
    for pattern in ("*.safetensors", "*.gguf"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found
        if found:
            raise CheckpointError(
                f"{folder} holds {len(found)} {pattern} files and no {INDEX}: {', '.join(p.name for p in found[:4])}",
                hint="give one GGUF file by its own path" if pattern == "*.gguf" else f"add the model's {INDEX}",
            )
    pickled = sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt*")])
    if pickled:
        raise CheckpointError(f"{folder} holds pickles only: {pickled[0]}", hint="convert the model to safetensors")
    raise CheckpointError(f"{folder} holds no {SINGLE}, no {INDEX} and no GGUF file")


def json_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds. Raises CheckpointError when it is missing, broken or no object."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _own(folder: Path) -> dict[str, Read]:
    """triptych-mini's panel, and what `compress` keeps for us alone because other programs cannot read it."""
    found: dict[str, Read] = {}
    for path in sorted((folder / PANEL.removesuffix(".")).glob("*.safetensors")):
        found |= {f"{PANEL}{path.stem}.{name}": read for name, read in _safetensors(path).items()}
    if (folder / OWN).is_dir():
        (first,) = _model_files(folder / OWN)
        config = folder / OWN / "config.json"  # absent where nothing there is in few bits
        found |= lowbit.compressed(json_object(config) if config.is_file() else {}, _raw(first))
    return found


def _raw(first: Path) -> dict[str, Raw]:
    """The tensors of an index's shards, or of one file."""
    return _sharded(first) if first.name == INDEX else _safetensors(first)


def _sharded(index: Path) -> dict[str, Raw]:
    """Every tensor the index names, from the shard it names. Raises CheckpointError where they disagree."""
    placed = json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to file names")
    shards = sorted(set(placed.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]}, outside its folder")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:4])}",
            hint="download the model again",
        )
    held = {shard: _safetensors(index.parent / shard) for shard in shards}
    lost = [name for name, shard in placed.items() if name not in held[shard]]
    if lost:
        raise CheckpointError(f"{index} puts {lost[0]} in {placed[lost[0]]}, which lacks it and {len(lost) - 1} more")
    extra = [(name, shard) for shard in shards for name in held[shard] if placed.get(name) != shard]
    if extra:
        raise CheckpointError(f"{extra[0][1]} holds {extra[0][0]} and {len(extra) - 1} more that {index} does not name")
    return {name: held[shard][name] for name, shard in placed.items()}


def _safetensors(path: Path) -> dict[str, Raw]:
    """The tensors of one file, mapped into memory."""
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path} is cut short: {size} bytes", hint="download it again")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    if start > size:
        raise CheckpointError(
            f"{path} is cut short or no safetensors file: its header ends at byte {start:,}, it has {size:,}",
            hint="download it again; a Git LFS pointer looks like this too",
        )
    try:
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        tensors = {name: _mapped(data, start, entry) for name, entry in header.items()}
        end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    if end != size:
        raise CheckpointError(f"{path} has {size:,} bytes, its header promises {end:,}", hint="download it again")
    return tensors


def _mapped(data: mmap.mmap, start: int, entry: dict[str, Any]) -> Raw:
    kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if kind not in DTYPES:
        raise ValueError(f"numbers of type {kind} are not read, only {', '.join(DTYPES)}")
    dtype, count = DTYPES[kind], math.prod(shape)
    if end - begin != count * dtype.itemsize:
        raise ValueError(f"{count:,} numbers of {kind} in {end - begin:,} bytes")

    def read() -> Array:
        if count == 0:
            return np.empty(shape, dtype)
        return np.frombuffer(data, dtype, count, start + begin).reshape(shape)

    return read
