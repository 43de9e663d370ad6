"""What is done to which weights: a list of frozen steps, resolved against the weights there are."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from triptych.compress.rounding import Grid, fitted
from triptych.core.spec import Fact
from triptych.errors import ConfigError

PartName = Literal["vision", "projector", "decoder", "embedding"]
PARTS: tuple[PartName, ...] = ("vision", "projector", "decoder", "embedding")
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]  # of each part, its weights by own name; those under rank 2 stay


class RecipeStep(Fact, frozen=True, kw_only=True):
    """What is done to some weights of one part.

    weights, but: names or runs of their dotted components (`down_proj`, `self_attn.v_proj`, `layers.0`), each of which
    must meet a weight of the part; no weights named: all. bits None keeps numbers, as `keep` says.
    scale: what moves between channels first. `awq` weighs all tokens alike, `mbq` each modality's by its sensitivity,
    `smooth` serves activations of 8 bits. round: to nearest, by GPTQ, or `felt`: by GPTQ and by how the
    divergence feels the outputs (the decoder's alone). widths: instead of `bits`, some to choose from
    by felt cost, so that this step's weights take at most `most_bits` each on average, scales included.
    train_steps: of training scales and norms end to end, once all weights are rounded; minutes each for large models.
    activations: 8 rounds the inputs too, with a static step. optional: a model without the part is no error.
    """

    part: PartName
    weights: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    bits: int | None = None
    widths: tuple[int, ...] = ()
    most_bits: float | None = None
    group_size: int | None = None  # None: a scale a row
    symmetric: bool = True
    scale: Literal["none", "smooth", "awq", "mbq"] = "none"
    round: Literal["nearest", "gptq", "felt"] = "nearest"
    train_steps: int = 0
    activations: Literal[8] | None = None
    keep: Literal["fp32", "bf16", "fp16"] = "bf16"
    optional: bool = False

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ConfigError(f"no part is called {self.part!r}", hint=f"choose one of {', '.join(PARTS)}")
        if bool(self.widths) != (self.most_bits is not None):
            raise ConfigError(f"{self.where}: widths and most_bits go together")
        if self.widths and self.part != "decoder":
            raise ConfigError(f"{self.where}: widths are chosen in the decoder alone", hint="bits = 8")
        if self.round == "felt" and self.part != "decoder":
            raise ConfigError(f"{self.where}: what is felt is known of the decoder alone", hint='round = "gptq"')
        if self.widths and self.bits is not None:
            raise ConfigError(f"{self.where}: bits {self.bits} and widths {self.widths}", hint="name one of them")
        if self.activations is not None and self.bits != 8:
            raise ConfigError(f"{self.where}: activations of 8 bits need weights of 8", hint="bits = 8")
        if self.is_kept and (self.scale != "none" or self.round != "nearest"):
            raise ConfigError(f"{self.where}: {self.scale}, {self.round} and no bits", hint="bits = 4")
        if self.train_steps and (self.is_kept or self.part != "decoder" or self.activations is not None):
            raise ConfigError(f"{self.where}: only a decoder's weights of few bits are trained, without `activations`")
        for bits in self.all_bits:
            self.grid(bits)

    @property
    def is_kept(self) -> bool:
        return self.bits is None and not self.widths

    @property
    def all_bits(self) -> tuple[int, ...]:
        return self.widths if self.bits is None else (self.bits,)

    @property
    def where(self) -> str:
        return f"step for {self.part}{': ' + ', '.join(self.weights) if self.weights else ''}"

    def grid(self, bits: int) -> Grid:
        return Grid(bits=bits, group_size=self.group_size, symmetric=self.symmetric)


class Recipe(Fact, frozen=True, kw_only=True):
    """Steps in the order in which they are taken. Every weight belongs to exactly one."""

    name: str
    steps: tuple[RecipeStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """One step and the weights it met; `grids` of each, for each width in bits; empty where they are kept."""

    step: RecipeStep
    names: tuple[str, ...]
    grids: Mapping[str, Mapping[int, Grid]]
    fallbacks: tuple[str, ...]  # sentences: groups that a width did not divide


_HEAD = RecipeStep(part="embedding", bits=8)
_VISION8 = RecipeStep(part="vision", bits=8, round="gptq", optional=True)
_W4 = RecipeStep(part="decoder", widths=(4, 8), most_bits=4.6, group_size=64, scale="mbq", round="felt", train_steps=32)
BUILTIN: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="modality",
            steps=(
                RecipeStep(part="vision", bits=8, activations=8, scale="smooth", round="gptq", optional=True),
                RecipeStep(part="projector", bits=4, group_size=32, round="gptq", optional=True),
                RecipeStep(part="decoder", keep="bf16"),
                _HEAD,
            ),
        ),
        Recipe(
            name="w4",
            steps=(
                _VISION8,
                RecipeStep(part="projector", bits=8, optional=True),
                _W4,
                _HEAD,
            ),
        ),
        Recipe(
            name="w8",
            steps=(
                _VISION8,
                RecipeStep(part="projector", bits=8, optional=True),
                RecipeStep(part="decoder", bits=8),
                _HEAD,
            ),
        ),
    )
}


def load(name: str) -> Recipe:
    """A built-in recipe by its name, or a TOML file's: `[[steps]]` tables. Raises ConfigError with what is wrong."""
    if name in BUILTIN:
        return BUILTIN[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise ConfigError(f"no recipe is called {name!r}", hint=f"{', '.join(BUILTIN)}, or a file that ends in .toml")
    try:
        content: dict[str, Any] = {"name": path.stem} | tomllib.loads(path.read_text())
        return msgspec.convert(content, Recipe)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}", hint="a recipe is a list of [[steps]], each with its part") from error


def resolve(recipe: Recipe, shapes: Shapes) -> tuple[Resolved, ...]:
    """Each step with the weights that it meets, of rank 2 and more.

    Raises ConfigError where a step or a name of it meets nothing, a weight belongs to two steps or to none.
    """
    offered = {part: {name: shape for name, shape in own.items() if len(shape) > 1} for part, own in shapes.items()}
    found: list[Resolved] = []
    owners: dict[tuple[str, str], RecipeStep] = {}
    for step in recipe.steps:
        own = offered.get(step.part, {})
        if not own and step.optional:
            continue
        names = _names(step, own)
        for name in names:
            if (other := owners.setdefault((step.part, name), step)) is not step:
                raise ConfigError(
                    f"recipe {recipe.name}: {name} of the {step.part} belongs to two steps",
                    hint=f"leave it out of one with `but`: {other.where} and {step.where}",
                )
        found.append(_fit(step, names, own))
    left = [f"{part}: {name}" for part, own in offered.items() for name in own if (part, name) not in owners]
    if left:
        raise ConfigError(
            f"recipe {recipe.name} says nothing of {_few(left)}",
            hint='a step with `keep = "bf16"` and no bits leaves weights as they are',
        )
    return tuple(found)


def _names(step: RecipeStep, own: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    if not own:
        raise ConfigError(f"{step.where}: the model has no weights there", hint="`optional = true` allows that")
    for wanted in (*step.weights, *step.but):
        if not any(_meets(wanted, name) for name in own):
            raise ConfigError(f"{step.where}: no weight is called {wanted!r}", hint=f"there are {_few(sorted(own))}")
    chosen = [name for name in own if not step.weights or any(_meets(wanted, name) for wanted in step.weights)]
    kept = tuple(name for name in chosen if not any(_meets(wanted, name) for wanted in step.but))
    if not kept:
        raise ConfigError(f"{step.where}: `but` leaves no weight of {len(chosen)}")
    return kept


def _meets(wanted: str, name: str) -> bool:
    """Whole components in a row: `layers.1` is in `layers.1.mlp.up_proj`, not in `layers.12.mlp.up_proj`."""
    return f".{wanted}." in f".{name}."


def _fit(step: RecipeStep, names: Sequence[str], own: Mapping[str, tuple[int, ...]]) -> Resolved:
    grids: dict[str, dict[int, Grid]] = {}
    fallbacks: list[str] = []
    for name in names:
        width = 1
        for side in own[name][1:]:
            width *= side
        for bits in step.all_bits:
            grid, sentence = fitted(step.grid(bits), name, width)
            grids.setdefault(name, {})[bits] = grid
            fallbacks += [sentence] if sentence and sentence not in fallbacks else []
    return Resolved(step=step, names=tuple(names), grids=grids, fallbacks=tuple(fallbacks))


def _few(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more:,} more" if more > 0 else "")
