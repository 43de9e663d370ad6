"""Finished work of a compression on disk, so that one that was interrupted goes on where it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from triptych.compress.samples import Sample
from triptych.core.quantized import Held, Quantized

ARRAYS = ("codes", "scales", "zeros")


class _Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What safetensors does not hold of a tensor: numpy's bf16 is stored as uint16."""

    is_bf16: bool = False
    bits: int | None = None  # None: a plain array
    shape: tuple[int, ...] = ()
    input_scale: float | None = None


def digest(samples: Sequence[Sample]) -> str:
    """Of every number of the samples, and of the code that makes something of them: the release's and this part's."""
    found = hashlib.sha256(version("triptych").encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        found.update(f"{source.name} {source.stat().st_size}\n".encode() + source.read_bytes())
    for sample in samples:
        for own in fields(sample):
            if own.name != "name":
                array = getattr(sample, own.name)
                found.update(f"{own.name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    return found.hexdigest()


def keep(tensors: dict[str, Held], path: Path) -> None:
    """Written whole or not at all."""
    arrays: dict[str, Any] = {}
    entries: dict[str, _Entry] = {}
    for name, held in tensors.items():
        if isinstance(held, Quantized):
            own = {f"{name}:{kind}": getattr(held, kind) for kind in ARRAYS}
            entry = _Entry(bits=held.bits, shape=held.shape, input_scale=held.input_scale)
        else:
            own, entry = {name: held}, _Entry()
        is_bf16 = any(array.dtype == ml_dtypes.bfloat16 for array in own.values())
        entries[name] = msgspec.structs.replace(entry, is_bf16=is_bf16)
        for key, array in own.items():
            array = np.ascontiguousarray(array)
            arrays[key] = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    save_file(arrays, scratch, {"entries": msgspec.json.encode(entries).decode()})
    scratch.replace(path)


def kept(path: Path) -> dict[str, Held]:
    with safe_open(path, "np") as file:
        entries = msgspec.json.decode(file.metadata()["entries"], type=dict[str, _Entry])

        def array(key: str, is_bf16: bool) -> Any:
            values = file.get_tensor(key)
            return values.view(ml_dtypes.bfloat16) if is_bf16 and values.dtype == np.uint16 else values

        return {
            name: array(name, entry.is_bf16)
            if entry.bits is None
            else Quantized(
                bits=entry.bits,
                shape=entry.shape,
                input_scale=entry.input_scale,
                **{kind: array(f"{name}:{kind}", entry.is_bf16) for kind in ARRAYS},
            )
            for name, entry in entries.items()
        }
