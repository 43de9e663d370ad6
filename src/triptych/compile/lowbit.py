"""Checkpoints in few bits as others write them: compressed-tensors, AWQ, GPTQ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.packing import num_words, unpack_words
from triptych.core.quantized import Quantized
from triptych.core.stored import Read, Scheme, decode, parse_scheme
from triptych.errors import CheckpointError

Array = NDArray[Any]
Raw = Mapping[str, Callable[[], Array]]  # the tensors of the files, by name
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's nibbles, from the lowest: the column that each holds
WHERE = "config.json: quantization_config"


def gathered(config: Mapping[str, Any], raw: Raw) -> dict[str, Read]:
    """The tensors as the model knows them: those that stand for one weight become that weight.

    Raises CheckpointError naming what is not read.
    """
    told = config.get("quantization_config")
    if told is None:
        return dict(raw)
    match told.get("quant_method"):
        case "compressed-tensors":
            return compressed(told, raw)
        case "awq":
            return _words(raw, partial(_awq, told, raw))
        case "gptq":
            return _words(raw, partial(_gptq, told, raw))
        case other:
            raise CheckpointError(f"{WHERE}: quant_method {other!r}; compressed-tensors, awq and gptq are read")


def compressed(told: Mapping[str, Any], raw: Raw) -> dict[str, Read]:
    """A folder whose modules have `weight_scale` beside `weight_packed` or whole bytes."""
    if told.get("transform_config"):
        raise CheckpointError(f"{WHERE}: transform_config; rotated weights are not built")
    groups = told.get("config_groups") or {}
    schemes = {name: parse_scheme(f"{WHERE}: {name}", group) for name, group in groups.items()}
    targets = [(target, schemes[name]) for name, group in groups.items() for target in group.get("targets", ())]
    modules = [name.removesuffix(".weight_scale") for name in raw if name.endswith(".weight_scale")]
    read: dict[str, Read] = {
        f"{module}.weight": partial(decode, module, _scheme(module, targets), raw) for module in modules
    }
    kinds = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale")
    spent = {f"{module}.{kind}" for module in modules for kind in kinds}
    for module in modules:
        if f"{module}.weight_g_idx" in raw:
            _check_order(module, raw, f"{module}.weight_g_idx", _scheme(module, targets).group_size)
    stray = [name for name in raw if name.endswith(".weight_packed") and name not in spent]
    if stray:
        raise CheckpointError(f"{stray[0]} has no weight_scale beside it", hint="the folder is not whole")
    return {**{name: value for name, value in raw.items() if name not in spent}, **read}


def _scheme(module: str, targets: list[tuple[str, Scheme]]) -> Scheme:
    """By exact name, then by pattern, then by class; as compressed-tensors looks it up."""
    kind = "Embedding" if "embed" in module.rsplit(".", 1)[-1] else "Linear"
    exact = [scheme for target, scheme in targets if target == module]
    alike = [scheme for target, scheme in targets if target.startswith("re:") and re.match(target[3:], module)]
    of_class = [scheme for target, scheme in targets if target == kind]
    for scheme in (*exact, *alike, *of_class):
        return scheme
    distinct = {scheme for _, scheme in targets}
    if len(distinct) == 1:
        return distinct.pop()  # targets name modules as their program does, not as the file
    raise CheckpointError(f"{WHERE}: no target is {module}, which has a weight_scale")


def _words(raw: Raw, weight: Callable[[str], Quantized]) -> dict[str, Read]:
    """AWQ and GPTQ keep a module as qweight, qzeros and scales, inputs along the first axis."""
    modules = [name.removesuffix(".qweight") for name in raw if name.endswith(".qweight")]
    spent = {f"{module}.{kind}" for module in modules for kind in ("qweight", "qzeros", "scales", "g_idx")}
    read: dict[str, Read] = {f"{module}.weight": partial(weight, module) for module in modules}
    return {**{name: value for name, value in raw.items() if name not in spent}, **read}


def _awq(told: Mapping[str, Any], raw: Raw, module: str) -> Quantized:
    """Eight outputs share a word, in AWQ's own order."""
    bits, version = _bits(told), str(told.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(f"{WHERE}: AWQ of {bits} bits in layout {version}; 4 bits in gemm are read")

    def columns(words: Array) -> NDArray[np.uint8]:
        """(n, outputs / 8) words to (outputs, n)."""
        rows, count = words.shape
        apart = unpack_words(words, 4, 8 * count).reshape(rows, count, 8)
        ordered = np.empty_like(apart)
        ordered[..., list(AWQ_ORDER)] = apart
        return np.ascontiguousarray(ordered.reshape(rows, -1).T)

    qweight, qzeros, scales = (_tensor(raw, module, kind) for kind in ("qweight", "qzeros", "scales"))
    return _grouped(module, told, columns(qweight), columns(qzeros), scales.T)


def _gptq(told: Mapping[str, Any], raw: Raw, module: str) -> Quantized:
    """Inputs share words in their order; zero points are stored one too low, but for layout gptq_v2."""
    bits = _bits(told)
    if bits not in (2, 3, 4, 8):
        raise CheckpointError(f"{WHERE}: GPTQ of {bits} bits; 2, 3, 4 and 8 are read")
    qweight, qzeros, scales = (_tensor(raw, module, kind) for kind in ("qweight", "qzeros", "scales"))
    width = len(qweight) * 32 // bits
    if len(qweight) != num_words(width, bits) or qzeros.shape[1] != num_words(qweight.shape[1], bits):
        raise CheckpointError(f"{module}: qweight {qweight.shape} and qzeros {qzeros.shape} are not in {bits} bits")
    codes = unpack_words(qweight.T, bits, width)
    zeros = unpack_words(qzeros, bits, len(codes)).T
    if told.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    if f"{module}.g_idx" in raw:
        _check_order(module, raw, f"{module}.g_idx", _size(told))
    return _grouped(module, told, codes, zeros, scales.T)


def _grouped(module: str, told: Mapping[str, Any], codes: Array, zeros: Array, scales: Array) -> Quantized:
    """codes (outputs, inputs); zeros and scales (outputs, groups)."""
    rows, width = codes.shape
    size = _size(told) or width
    sides = (rows, -(-width // size))
    if width % size or zeros.shape != sides or scales.shape != sides:
        raise CheckpointError(
            f"{module}: zero points {zeros.shape} and scales {scales.shape}; {rows} × {width} in groups of {size} "
            f"needs {sides}"
        )
    return Quantized(
        bits=_bits(told),
        codes=codes.reshape(*sides, size),
        scales=np.ascontiguousarray(scales)[..., None],
        zeros=np.ascontiguousarray(zeros)[..., None],
        shape=(rows, width),
    )


def _bits(told: Mapping[str, Any]) -> int:
    return int(told.get("bits", told.get("w_bit", 0)))


def _size(told: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale; None where all do."""
    size = told.get("group_size", told.get("q_group_size", 128))
    return None if size in (None, -1) else int(size)


def _check_order(module: str, raw: Raw, name: str, size: int | None) -> None:
    """Groups of inputs that are no neighbours have no fast form here."""
    index = raw[name]()
    if not np.array_equal(index, np.arange(len(index)) // (size or len(index))):
        raise CheckpointError(
            f"{module}: its groups follow the order of activations (g_idx), which is not built",
            hint="quantize without desc_act, or with static groups",
        )


def _tensor(raw: Raw, module: str, kind: str) -> Array:
    if f"{module}.{kind}" not in raw:
        raise CheckpointError(f"{module} has no {kind} beside its qweight", hint="the folder is not whole")
    return raw[f"{module}.{kind}"]()
