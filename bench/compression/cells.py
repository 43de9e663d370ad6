"""What is compared: recipes × reductions × KV policies, each axis in full and the corners where they meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

RECIPES = ("fp32", "bf16", "int8", "modality", "w8", "w4")
KEPT = (0.5, 0.33)
REDUCTIONS = ("cenprune", "cdpruner", "tome", "pool", "grid", "random")
BASELINES = ("pool", "grid", "random")
CACHES = ("bf16", "u8", "u4")
EVICTIONS = ("snapkv", "tova", "knorm", "window")  # what needs no statistics; bench/kv.py holds `expected` beside them
BUDGET = 0.33  # of every eviction
THIRD = 0.6  # with u8 it is a third of bf16's bytes
WHOLE = "whole"
NEVER = "never"
PLAIN = "int8"  # the recipe on which reductions and caches are told apart: what `compile` makes by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to serve. reduce: `METHOD:KEEP` or `whole`; evict: `METHOD:BUDGET` or `never`."""

    recipe: str
    reduce: str = WHOLE
    cache: str = "u8"
    evict: str = NEVER

    @property
    def name(self) -> str:
        return " · ".join((self.recipe, self.reduce, self.cache, self.evict))

    @property
    def is_reference(self) -> bool:
        return self == REFERENCE

    @property
    def sets(self) -> tuple[str, ...]:
        """The questions that tell something about it: what its own axis is about, all where several axes meet."""
        if self.recipe != PLAIN or (self.reduce == WHOLE and self.evict == NEVER):
            return ("long", "single", "text")
        return ("single",) if self.evict == NEVER else ("long",)

    def facts(self) -> dict[str, Any]:
        return {"cell": self.name, **asdict(self)}


REFERENCE = Cell(recipe="fp32", cache="f32")  # fp32 weights, arithmetic and cache


def cells() -> list[Cell]:
    """In order, each once; the reference first."""
    return list(dict.fromkeys(_all()))


def _all() -> Iterator[Cell]:
    yield REFERENCE
    yield from (Cell(recipe=recipe) for recipe in RECIPES[1:])
    for method in REDUCTIONS:
        yield from (Cell(recipe=PLAIN, reduce=f"{method}:{keep}") for keep in KEPT)
    yield from (Cell(recipe=PLAIN, cache=cache) for cache in CACHES)
    for method in EVICTIONS:
        yield Cell(recipe=PLAIN, evict=f"{method}:{BUDGET}")
    yield Cell(recipe=PLAIN, evict=f"{EVICTIONS[0]}:{THIRD}")
    yield from corners()


def corners() -> Iterator[Cell]:
    """Everything at once, gently and hard."""
    yield Cell(recipe="modality", reduce="cenprune:0.5", evict=f"expected:{THIRD}")
    yield Cell(recipe="w4", reduce="cenprune:0.33", evict=f"expected:{BUDGET}")
