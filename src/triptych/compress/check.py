"""Reopen a compressed folder and hold every weight against its source and its recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from triptych.compress.fold import Factors
from triptych.compress.recipe import Resolved
from triptych.compress.train import RATE
from triptych.compress.write import Changes, Source
from triptych.core.quantized import Float, Held, Quantized, dequantize, digest, plain
from triptych.core.stored import OWN, Read, Scheme, decode, parse_scheme, scheme_of
from triptych.errors import GateError

LEAST_SQNR_DB = {8: 25.0, 7: 22.0, 6: 19.0, 5: 15.0, 4: 9.0, 3: 4.0, 2: 0.5, 1: 0.0}  # of a whole weight
HINT = "this is a fault of triptych, or of a recipe's step: nothing was written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the recipe says of one weight: any of these grids; what was folded into it before, (rows, 1) or (width,)
    each; by what share training may have moved its scales, at most.
    """

    schemes: frozenset[Scheme]
    factors: tuple[Float, ...] = ()
    growth: float = 0.0


Asked = Mapping[str, Mapping[str, Wanted]]  # of each part, by the checkpoint's own names


def wanted(steps: Sequence[Resolved], names: Mapping[str, Mapping[str, str]], factors: Mapping[str, Factors]) -> Asked:
    """Of each part, by the checkpoint's own names, what its steps say, and what they have folded (`factors`).

    names: own name → the checkpoint's.
    """
    found: dict[str, dict[str, Wanted]] = {}
    for resolved in steps:
        step = resolved.step
        for name, grids in resolved.grids.items():
            schemes = frozenset(
                Scheme(
                    bits=bits, group_size=grid.group_size, symmetric=grid.symmetric, is_static=bool(step.activations)
                )
                for bits, grid in grids.items()
            )
            folded = factors.get(step.part, {}).get(name, ())
            found.setdefault(step.part, {})[names[step.part][f"{name}.weight"]] = Wanted(
                schemes=schemes,
                factors=tuple(factor.numpy() for factor in folded),
                growth=RATE * step.train_steps / 2,  # the rate falls evenly to nothing
            )
    return found


def check_folder(folder: Path, source: Source, changes: Changes, asked: Asked) -> None:
    """Raises GateError that names the part and the weight: one that is left unquantized, lies on another grid than was
    asked, is not what was handed to the writer, or is further from the source than its bits allow.
    """
    held = _reopened(folder)
    for part, wishes in asked.items():
        for name, wish in wishes.items():
            where = f"{part}: {name}"
            weight = held[name]() if name in held else None
            if not isinstance(weight, Quantized):
                is_what = "missing" if weight is None else f"left in {weight.dtype}"
                raise GateError(f"{where} is {is_what}, the recipe says {_told(wish)}", hint=HINT)
            _check_grid(where, weight, wish)
            _check_source(where, weight, plain(source.tensors[name]()), wish)
    for part, name, change in _each(changes):
        found = held[name]() if name in held else None
        if found is None or not _same(found, change):
            raise GateError(f"{part}: {name} does not read as it was written", hint=HINT)


def _check_grid(where: str, weight: Quantized, wish: Wanted) -> None:
    """An uneven grid whose zero points all came out in the middle is told as an even one."""
    width = int(np.prod(weight.shape[1:]))
    mine = scheme_of(weight)
    for scheme in wish.schemes:
        size = None if scheme.group_size == width else scheme.group_size
        is_even = mine.symmetric or not scheme.symmetric
        if is_even and (mine.bits, mine.group_size, mine.is_static) == (scheme.bits, size, scheme.is_static):
            return
    raise GateError(f"{where} is in {_words(mine)}, the recipe says {_told(wish)}", hint=HINT)


def _check_source(where: str, weight: Quantized, true: Any, wish: Wanted) -> None:
    """Its error as a whole, and of each group the scale that would fit its codes best, against the one that it has.

    Rounding moves the best scale by its noise over the root of the group's size; a scale that belongs to another
    group moves it by far more. What was folded into the weight is known and multiplied in first: factors found by
    fitting would take another row's scale for a factor of this one's.
    """
    rows = len(weight.codes)
    a, b = np.asarray(true, np.float32).reshape(rows, -1), dequantize(weight).reshape(rows, -1)
    for factor in wish.factors:
        a = a * factor
    energy, noise = float(np.square(a).sum(dtype=np.float64)), float(np.square(a - b).sum(dtype=np.float64))
    sqnr = 10 * np.log10(energy / noise) if noise > 0 and energy > 0 else np.inf
    least = -10 * np.log10(10 ** (-LEAST_SQNR_DB[weight.bits] / 10) + wish.growth**2)
    if sqnr < least:
        raise GateError(f"{where} is {sqnr:.1f} dB from its source; {weight.bits} bits give {least:g} dB", hint=HINT)
    drift, most = _drift(a, b, weight.codes.shape), 0.02 + 1.1 * 0.5**weight.bits + wish.growth
    if drift > most:
        raise GateError(
            f"{where}: its scales are {drift:.1%} from those that fit its codes, {most:.1%} at most are rounding's",
            hint=HINT,
        )


def _drift(a: Float, b: Float, groups: tuple[int, ...]) -> float:
    """Root mean square over the groups of log(best scale / own scale), each weighed by its energy."""
    a, b = (x.reshape(groups) for x in (a, b))
    square, product = np.square(b).sum(-1), (a * b).sum(-1)
    if not square.sum() > 0:
        return 0.0
    ratio = np.log(np.maximum(product, 1e-30) / np.maximum(square, 1e-30))
    return float(np.sqrt(np.average(np.minimum(np.square(ratio), 1.0), weights=square)))


def _same(found: Held, change: Held) -> bool:
    if isinstance(found, Quantized) and isinstance(change, Quantized):
        step = _cast(change.input_scale, change.scales.dtype, found.scales.dtype)
        change = replace(change, input_scale=step)
    return digest(found) == digest(change)


def _cast(value: float | None, *kinds: np.dtype[Any]) -> float | None:
    """As the writer does it: an input's scale in the type of the weight's, then in the model's."""
    for kind in kinds:
        value = None if value is None else float(np.asarray(value, kind))
    return value


def _each(changes: Changes) -> Iterator[tuple[str, str, Held]]:
    return ((part, name, held) for part, tensors in changes.items() for name, held in tensors.items())


def _told(wish: Wanted) -> str:
    return " or ".join(sorted(_words(scheme) for scheme in wish.schemes))


def _words(scheme: Scheme) -> str:
    groups = "a scale a row" if scheme.group_size is None else f"groups of {scheme.group_size}"
    return f"{scheme.bits} bits, {groups}" + (", inputs in 8 bits" if scheme.is_static else "")


def _reopened(folder: Path) -> dict[str, Read]:
    """Every tensor by its name, quantized ones as `Quantized`; what is kept for us goes before its plain twin."""
    told = json.loads((folder / "config.json").read_bytes()).get("quantization_config") or {}
    found = _tensors(folder, told)
    if (folder / OWN).is_dir():
        ours = (
            json.loads((folder / OWN / "config.json").read_bytes()) if (folder / OWN / "config.json").is_file() else {}
        )
        found |= _tensors(folder / OWN, ours)
    return found


def _tensors(folder: Path, told: Mapping[str, Any]) -> dict[str, Read]:
    raw: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            raw |= {name: partial(_tensor, path, name) for name in file.keys()}  # noqa: SIM118
    schemes = {
        target: parse_scheme(group_name, group)
        for group_name, group in (told.get("config_groups") or {}).items()
        for target in group["targets"]
    }
    modules = {name.removesuffix(".weight_scale") for name in raw if name.endswith(".weight_scale")}
    read: dict[str, Read] = dict(raw)
    for module in modules:
        if module not in schemes:
            raise GateError(f"{module} has a scale, and no group of config.json names it", hint=HINT)
        read[f"{module}.weight"] = partial(decode, module, schemes[module], raw)
    return read


def _tensor(path: Path, name: str) -> NDArray[Any]:
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
    if tensor.dtype == torch.bfloat16:
        narrow: NDArray[Any] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return narrow
    plain_array: NDArray[Any] = tensor.numpy()
    return plain_array
