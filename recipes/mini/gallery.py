"""Captions without end: what the panel makes of training scenes, and captions spelled from random facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from recipes.mini import tune
from recipes.mini.caption import NAME_TOKENS, SLOTS, constant_sizes, spell, token_ids
from recipes.mini.model import Panel
from recipes.mini.questions import NUMBERS, UNKNOWN, Facts
from recipes.mini.scenes import COLOUR_NAMES
from recipes.mini.train import Shards, unpack

SPELLED, PHOTOS = 0.4, 0.22  # shares; photographs are spelled too
SCENES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A caption (NUM_TOKENS, hidden), what it says, and the slots of its names."""

    rows: Tensor
    facts: Facts
    places: list[int]

    def words(self) -> list[int]:
        """The rows that hold kind, count, colour and names; of three names or more the first row each.

        A photograph's count and colour are the same word, of which any choice takes one.
        """
        before_count, before_colour, before_names, _, _ = constant_sizes()
        colour = 2 + before_count + before_colour
        found, first = [0, 1 + before_count, *[colour] * (not self.facts.photo)], colour + 1 + before_names
        for name, place in zip(self.facts.names, self.places, strict=True):
            length = 1 if len(self.places) > 2 else min(NAME_TOKENS, len(token_ids(" " + name)))
            found += range(first + place * (1 + NAME_TOKENS), first + place * (1 + NAME_TOKENS) + length)
        return found


class Gallery:
    """Captions without end: the panel's of cached training scenes, and spelled ones."""

    def __init__(self, panel: Panel, table: Tensor) -> None:
        self.panel, self.table, self.said = panel, table, panel.said
        shards = Shards("train")
        shards.refresh()
        batches = islice(shards.batches(200, None), SCENES // 200)
        self.features = torch.cat([unpack(batch)[0] for batch in batches])
        read = [each for part in self.features.split(250) for each in read_off(panel, part)]
        self.read = {at: each for at, each in enumerate(read) if each is not None}

    def shown(self, rng: np.random.Generator) -> Shown:
        """One, with the learned rows as they are now."""
        luck = rng.random()
        if luck >= SPELLED:
            at = int(rng.choice(list(self.read)))
            facts, places = self.read[at]
            return Shown(rows=self.panel(self.features[at][None])[0], facts=facts, places=places)
        facts, places = tune.imagine(self.said, rng), [0]
        if luck < PHOTOS:
            name = str(rng.choice(self.said.spelled[self.said.num_concepts :]))
            facts = Facts(photo=True, names=(name,), colour=UNKNOWN, count=UNKNOWN)
        if not facts.photo:
            places = sorted(rng.permutation(SLOTS)[: len(facts.names)].tolist())
        rows = spell(facts, places, self.said, self.table, self.panel.constants)
        return Shown(rows=rows, facts=facts, places=places)


@torch.no_grad()
def read_off(panel: Panel, features: Tensor) -> Iterator[tuple[Facts, list[int]] | None]:
    """What captions of scenes say and in which slots; None for those that say a name twice or see a photograph."""
    for logits, present, colour, photo, _ in zip(*panel.decisions(features), strict=True):
        places = [slot for slot in range(SLOTS) if present[slot] > 0.5]
        names = tuple(panel.said.spelled[int(logits[slot].argmax())] for slot in places)
        if photo > 0.1 or len(set(names)) < len(names):
            yield None
            continue
        yield (
            Facts(photo=False, names=names, colour=COLOUR_NAMES[int(colour.argmax())], count=NUMBERS[len(names)]),
            places,
        )
