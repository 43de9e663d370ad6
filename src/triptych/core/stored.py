"""How a quantized weight lies in a checkpoint: compressed-tensors' tensors, and its words for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.packing import num_words, pack_words, unpack_words
from triptych.core.quantized import Held, Quantized
from triptych.errors import CheckpointError

Array = NDArray[Any]
Read = Callable[[], Held]  # one tensor, before it is read

PANEL = "panel."  # what triptych-mini's own tensors are called after; no other program reads them
OWN = "triptych"  # the subfolder for what compressed-tensors cannot hold, in the same way of writing
PACKED, PLAIN = "pack-quantized", "int-quantized"
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What one of config.json's `config_groups` says of its weights; those of equal schemes share a group.

    group_size: neighbours that share a scale; None: a whole row. is_static: inputs are in 8 bits too, by a fixed scale.
    """

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    is_static: bool = False

    @property
    def format(self) -> str:
        """Both are whole numbers; only what meets rounded inputs is stored a byte each, for kernels that want it so."""
        return PLAIN if self.is_static and self.bits == 8 else PACKED

    def group(self, targets: Sequence[str]) -> dict[str, Any]:
        """The entry of `config_groups` for the modules `targets`."""
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False}
        by_group = {"strategy": "channel"} if self.group_size is None else {"strategy": "group"}
        return {
            "targets": list(targets),
            "format": self.format,
            "weights": {**weights, **by_group, "group_size": self.group_size},
            "input_activations": dict(INPUTS) if self.is_static else None,
            "output_activations": None,
        }


def scheme_of(quantized: Quantized) -> Scheme:
    return Scheme(
        bits=quantized.bits,
        group_size=quantized.group_size if quantized.codes.shape[1] > 1 else None,
        symmetric=quantized.is_symmetric,
        is_static=quantized.input_scale is not None,
    )


def parse_scheme(where: str, group: Mapping[str, Any]) -> Scheme:
    """Raises CheckpointError naming what is not read: floats, blocks, rounded outputs, inputs with a zero point."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    strategy, bits = weights.get("strategy"), weights.get("num_bits")
    is_static = bool(inputs) and not inputs.get("dynamic")
    wrong = {
        f"weights of type {weights.get('type')!r}": weights.get("type", "int") != "int",
        f"strategy {strategy!r}": strategy not in ("group", "channel", "tensor"),
        f"{bits!r} bits": not isinstance(bits, int) or not 1 <= bits <= 8,
        "rounded outputs": bool(group.get("output_activations")),
        f"static inputs {inputs}": is_static and any(inputs.get(key) != value for key, value in INPUTS.items()),
    }
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise CheckpointError(f"{where}: {', '.join(found)}; weights in whole numbers of 1 to 8 bits are read")
    size = weights.get("group_size") if strategy == "group" else None
    return Scheme(
        bits=int(weights["num_bits"]),
        group_size=size,
        symmetric=bool(weights.get("symmetric", True)),
        is_static=is_static,
    )


def encode(quantized: Quantized) -> dict[str, Array]:
    """The tensors that stand for a weight, by what follows its module's name. Raises ValueError on a padded width."""
    rows, groups, size = quantized.codes.shape
    if groups * size != int(np.prod(quantized.shape[1:])):
        raise ValueError(f"{groups} groups of {size} are not a row of {quantized.shape}")
    scheme, middle = scheme_of(quantized), 1 << (quantized.bits - 1)
    zeros, scales = quantized.zeros.reshape(rows, groups), quantized.scales.reshape(rows, groups)
    tensors: dict[str, Array] = {"weight_scale": scales}
    if scheme.format == PLAIN:
        tensors["weight"] = _signed(quantized.codes, middle).reshape(quantized.shape)
        tensors |= {} if scheme.symmetric else {"weight_zero_point": _signed(zeros, middle)}
    else:
        tensors["weight_packed"] = pack_words(quantized.codes.reshape(rows, -1), quantized.bits)
        tensors["weight_shape"] = np.array(quantized.shape, np.int64)
        packed = np.ascontiguousarray(pack_words(np.ascontiguousarray(zeros.T), quantized.bits).T)
        tensors |= {} if scheme.symmetric else {"weight_zero_point": packed}
    if quantized.input_scale is not None:
        tensors["input_scale"] = np.array([quantized.input_scale], scales.dtype)
    return tensors


def decode(module: str, scheme: Scheme, tensors: Mapping[str, Callable[[], Array]]) -> Quantized:
    """The inverse of `encode`; one scale for a whole matrix will do. Raises CheckpointError where shapes disagree."""

    def tensor(kind: str, shape: tuple[int, ...] | None = None) -> Array:
        if f"{module}.{kind}" not in tensors:
            raise CheckpointError(f"{module} has no {kind}", hint="its folder is not whole; write it again")
        found = tensors[f"{module}.{kind}"]()
        if shape is not None and found.shape != shape:
            raise CheckpointError(f"{module}: {kind} has shape {found.shape}, {scheme.bits} bits of it need {shape}")
        return found

    middle, is_packed = 1 << (scheme.bits - 1), f"{module}.weight_packed" in tensors
    shape = tuple(int(n) for n in tensor("weight_shape")) if is_packed else tensor("weight").shape
    rows, width = shape[0], int(np.prod(shape[1:]))
    size = scheme.group_size or width
    if width % size:
        raise CheckpointError(f"{module}: width {width} is not a multiple of {size}")
    sides = (rows, width // size)
    if is_packed:
        codes = unpack_words(tensor("weight_packed", (rows, num_words(width, scheme.bits))), scheme.bits, width)
    else:
        codes = _unsigned(tensor("weight"), middle)
    zeros = np.full(sides, middle, np.uint8)
    if not scheme.symmetric:
        packed = (num_words(rows, scheme.bits), sides[1])
        held = tensor("weight_zero_point", packed if is_packed else sides)
        zeros = unpack_words(held.T, scheme.bits, rows).T if is_packed else _unsigned(held, middle)
    scales = tensor("weight_scale")
    if scales.size == 1 and scheme.group_size is None:
        scales = np.broadcast_to(scales.reshape(1, 1), sides)
    if scales.shape != sides:
        raise CheckpointError(f"{module}: weight_scale has shape {scales.shape}, groups of {size} need {sides}")
    return Quantized(
        bits=scheme.bits,
        codes=codes.reshape(*sides, size),
        scales=np.ascontiguousarray(scales)[..., None],
        zeros=np.ascontiguousarray(zeros)[..., None],
        shape=shape,
        input_scale=float(tensor("input_scale").reshape(-1)[0]) if scheme.is_static else None,
    )


def _signed(codes: NDArray[np.uint8], middle: int) -> NDArray[np.int8]:
    return (codes.astype(np.int16) - middle).astype(np.int8)


def _unsigned(codes: Array, middle: int) -> NDArray[np.uint8]:
    return (codes.astype(np.int16) + middle).astype(np.uint8)
