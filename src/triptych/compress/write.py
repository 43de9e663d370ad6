"""Write a compressed checkpoint: a Hugging Face folder in compressed-tensors' format."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from triptych.core.bundle import COMPRESSION, Compression, write_folder
from triptych.core.quantized import Held, Quantized, dequantize, digest
from triptych.core.stored import OWN, PANEL, Array, Read, Scheme, encode, scheme_of
from triptych.errors import CheckpointError

SHARD_BYTES = 5_000_000_000
KINDS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}
KINDS |= {"int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
FLOATS = ("float32", "float16", "bfloat16")
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack", ".index.json")
TABLES = ("embed_tokens", "position_embedding", "lm_head")  # ends of names: looked up, or tied to what is
SPELLINGS = (  # how transformers calls a module whose tensors older files keep under another name
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint as it is: its folder, what its config.json says, and each of its tensors, not yet read."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Read]


Changes = Mapping[str, Mapping[str, Held]]  # of each part, by the checkpoint's own names: what takes a tensor's place
Check = Callable[[Path], None]  # of a folder that is whole and not yet in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What lies beside the weights: what was done, and further files by name (statistics of the KV cache)."""

    compression: Compression
    files: Mapping[str, bytes] = field(default_factory=dict)


def write_checkpoint(
    source: Source, target: Path, changes: Changes, beside: Beside, *, check: Check = lambda folder: None
) -> None:
    """Write the folder in one step, once `check` has seen it; an older compressed checkpoint at `target` is replaced.

    compressed-tensors holds matrices, and its readers disagree on tables and heads: transformers 5.24 loads no packed
    table, vLLM 0.32 none without Triton, neither one that is tied. So a quantized convolution, table or head is written
    as plain numbers for other programs, and once more, quantized, into `triptych/` for ours; of triptych-mini's panel,
    which no other program reads, only the latter. Raises CheckpointError on a name that the source lacks, a shape that
    is not its own, or scales that the model's type cannot hold; BundleError where something else stands at `target`.
    """
    _check(source, changes)
    changed = {name: held for part in changes.values() for name, held in part.items()}

    def fill(folder: Path) -> None:
        _fill(folder, source, changed, beside)
        check(folder)

    write_folder(target, COMPRESSION, "compressed checkpoint", fill)


def _fill(folder: Path, source: Source, changed: Mapping[str, Held], beside: Beside) -> None:
    made = _Folder(model_type=_float_type(source, changed))
    shards, own = _Shards(folder), _Shards(folder / OWN)
    for name in sorted(source.tensors):
        held = changed.get(name)
        made.place(name, source.tensors[name]() if held is None else held, shards, own)
    told = msgspec.structs.replace(beside.compression, digests=made.digests)
    shards.close()
    own.close()
    _copy(source.folder, folder)
    for name, content in {**made.configs(source.config), COMPRESSION: _json(told)}.items():
        (folder / name).write_bytes(content)
    for name, raw in beside.files.items():
        (folder / name).write_bytes(raw)


class _Folder:
    """What has been placed so far: the modules of each scheme, for others to read and for us."""

    def __init__(self, model_type: str) -> None:
        self.digests: dict[str, str] = {}
        self._type = model_type
        self._shared: dict[Scheme, list[str]] = {}
        self._own: dict[Scheme, list[str]] = {}
        self._ignored: list[str] = ["lm_head"]

    def place(self, name: str, held: Held, shards: _Shards, own: _Shards) -> None:
        module, is_ours = name.removesuffix(".weight"), name.startswith(PANEL)
        held = self._told(name, held) if isinstance(held, Quantized) else held
        self.digests[name] = digest(held)
        if not isinstance(held, Quantized):
            (own if is_ours else shards).add({name: held})
            if held.ndim == 2 and name.endswith(".weight") and not module.endswith(TABLES):
                self._ignored += _spelled(module)
            return
        is_shared = len(held.shape) == 2 and not is_ours and not module.endswith(TABLES)
        tensors = {f"{module}.{kind}": value for kind, value in encode(held).items()}
        (shards if is_shared else own).add(tensors)
        (self._shared if is_shared else self._own).setdefault(scheme_of(held), []).append(module)
        if not is_shared and not is_ours:
            shards.add({name: dequantize(held).astype(np.dtype(self._type))})
            self._ignored += _spelled(module)

    def _told(self, name: str, held: Quantized) -> Quantized:
        """Scales in the model's type, in which every reader holds them."""
        kind, step = np.dtype(self._type), held.input_scale
        scales = held.scales.astype(kind)
        if not np.array_equal(scales.astype(np.float32), held.scales.astype(np.float32)):
            was = held.scales.dtype
            raise CheckpointError(f"{name}: scales in {was} are not the same in {self._type}, the model's own")
        step = None if step is None else float(np.asarray(step, held.scales.dtype).astype(kind))
        return replace(held, scales=scales, input_scale=step)

    def configs(self, source: Mapping[str, Any]) -> dict[str, bytes]:
        """config.json, and ours where anything is kept for us."""
        config = {key: value for key, value in source.items() if key not in ("quantization_config", "torch_dtype")}
        config |= {"dtype": self._type}
        taken = {name for modules in self._shared.values() for module in modules for name in _spelled(module)}
        if self._shared:
            formats = {scheme.format for scheme in self._shared}
            config["quantization_config"] = {
                "quant_method": "compressed-tensors",
                "format": formats.pop() if len(formats) == 1 else "mixed-precision",
                "quantization_status": "compressed",
                "global_compression_ratio": None,
                "config_groups": _groups(self._shared),
                "ignore": [name for name in dict.fromkeys(self._ignored) if name not in taken],
                "kv_cache_scheme": None,
            }
        ours = {f"{OWN}/config.json": _json({"config_groups": _groups(self._own)})} if self._own else {}
        return {"config.json": _json(config), **ours}


def _groups(schemes: Mapping[Scheme, Iterable[str]]) -> dict[str, Any]:
    return {
        f"group_{index}": scheme.group([name for module in modules for name in _spelled(module)])
        for index, (scheme, modules) in enumerate(schemes.items())
    }


def _spelled(module: str) -> list[str]:
    """The module's name in the file, and as transformers calls it where that differs."""
    found = [new + module.removeprefix(old) for old, new in SPELLINGS if module.startswith(old)]
    return [module, *found[:1]]


def _check(source: Source, changes: Changes) -> None:
    for part, tensors in changes.items():
        for name, held in tensors.items():
            if name not in source.tensors:
                raise CheckpointError(f"{part}: {source.folder} has no tensor {name}")
            was = source.tensors[name]().shape
            if tuple(held.shape) != tuple(was):
                raise CheckpointError(f"{part}: {name} has shape {tuple(held.shape)}, in the source {tuple(was)}")


def _float_type(source: Source, changed: Mapping[str, Held]) -> str:
    """The type of most of the plain numbers; a checkpoint with none says it in its config."""
    counts: Counter[str] = Counter()
    for name, read in source.tensors.items():
        held = changed[name] if name in changed else read()
        if not isinstance(held, Quantized) and not name.startswith(PANEL) and str(held.dtype) in FLOATS:
            counts[str(held.dtype)] += held.size
    told = source.config.get("dtype") or source.config.get("torch_dtype") or "float32"
    return counts.most_common(1)[0][0] if counts else str(told)


def _copy(source: Path, folder: Path) -> None:
    """Tokenizer, processor, template, licence: all files but weights and what is written anew."""
    for path in [*source.glob("*"), *source.glob(f"{PANEL.removesuffix('.')}/*")]:
        inside = path.relative_to(source)
        if not path.is_file() or path.name.endswith(WEIGHTS) or path.name.startswith("."):
            continue
        if inside.name not in ("config.json", COMPRESSION) or len(inside.parts) > 1:
            (folder / inside).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / inside)


def _json(content: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1)


class _Shards:
    """Tensors gathered into files of a folder, none over SHARD_BYTES but for one module's; an index for several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Array] = {}
        self._written: list[list[str]] = []
        self._num_bytes = 0

    def add(self, tensors: Mapping[str, Array]) -> None:
        """One module's, kept together."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._open and sum(tensor.nbytes for tensor in self._open.values()) + size > SHARD_BYTES:
            self._flush()
        self._open |= tensors

    def close(self) -> None:
        if self._open:
            self._flush()
        count = len(self._written)
        names = [f"model-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for index, name in enumerate(names):
            self._path(index).rename(self._folder / name)
        if count > 1:
            placed = {tensor: name for name, held in zip(names, self._written, strict=True) for tensor in held}
            index_file = {"metadata": {"total_size": self._num_bytes}, "weight_map": placed}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1))

    def _flush(self) -> None:
        self._folder.mkdir(exist_ok=True)
        with self._path(len(self._written)).open("wb") as file:
            self._num_bytes += _write_safetensors(file, self._open)
        self._written.append(list(self._open))
        self._open = {}

    def _path(self, index: int) -> Path:
        return self._folder / f".shard-{index}"


def _write_safetensors(file: BinaryIO, tensors: Mapping[str, Array]) -> int:
    """A header of names, types and places, then the numbers one after another; returns their bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))  # so that each starts aligned
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": KINDS[str(tensor.dtype)], "shape": tensor.shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for tensor in tensors.values():
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return end
