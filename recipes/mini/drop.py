"""Stage 5 (B): tune the rows once more, with rows left out as the server does (`python -m recipes.mini.drop`).

Each step shows four captions: all rows twice, a half and a third, chosen by the server's own methods, places kept.
First, without the decoder, the learned rows are moved until the choice keeps the words (`crowding`); then answers are
taught. Captions are what the panel makes of training scenes, whose facts are what the caption says, and spelled ones.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from recipes.mini import decoder, export, tune
from recipes.mini.caption import NAME_TOKENS, NUM_TOKENS, SLOTS, constant_sizes, spell, token_ids, words
from recipes.mini.model import Panel
from recipes.mini.questions import ASKED, NUMBERS, UNKNOWN, Facts, answer
from recipes.mini.scenes import COLOUR_NAMES
from recipes.mini.train import Shards, unpack
from triptych.media.reduce.diversity import cdpruner, cenprune
from triptych.media.reduce.run import Run

HALF, THIRD = NUM_TOKENS // 2, round(NUM_TOKENS * 0.33)
COUNTS = (NUM_TOKENS, NUM_TOKENS, HALF, THIRD)  # rows of a step's captions
BY_CHANCE = 0.1  # of the steps' captions have any count
SPELLED, PHOTOS = 0.4, 0.22  # shares; photographs are spelled too
SCENES = 2000
RATE, CROWDING = 0.01, 0.3
MARGIN = 0.35  # by which a word's log volume is to lead
ARRANGING, PULL = 150, 0.02  # steps without the decoder; what a squared move costs
TINY = 1e-6  # as the server's


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


def asked(facts: Facts, whole: bool, others: list[str], rng: np.random.Generator) -> list[tuple[str, str]]:
    """Questions with answers; what a caption cut short cannot tell (more than two names) is not asked of it."""
    few, luck = len(facts.names) <= 2, rng.random()
    kinds = ["list"] * (len(facts.names) > 1 and (whole or few)) or ["name"] * few
    kinds += ["colour", "count", *["describe"] * (whole or (few and luck < 0.5)), *["has"] * (whole and luck < 0.3)]
    if facts.photo:
        again, other = rng.choice(["name", "list"], p=[0.7, 0.3]), rng.choice(["colour", "count", "has", "describe"])
        kinds = ["name", str(again), str(other)]
    made = []
    for kind in kinds:
        name = str(rng.choice(facts.names if rng.random() < 0.5 else others)) if kind == "has" else ""
        made.append((str(rng.choice(ASKED[kind])).format(name), answer(kind, facts, name)))
    return made


def crowding(shown: Shown, count: int) -> Tensor:
    """By how much the log volumes of words that `cenprune` leaves out miss the least of the other rows it takes.

    Its greedy choice (media/reduce/diversity.py) over again, so that gradients flow through the volumes.
    """
    ways = F.normalize(shown.rows, dim=-1)
    likeness = -(ways @ ways.sum(0))
    weights = ((likeness - likeness.min()) / (likeness.max() - likeness.min())).clamp_min(TINY)
    features = F.normalize(shown.rows - shown.rows.mean(0), dim=-1) * weights[:, None]
    kernel = features @ features.T
    volumes, factors, wanted = kernel.diagonal(), list[Tensor](), set(shown.words())
    left, beaten = list(range(NUM_TOKENS)), list[Tensor]()
    for _ in range(count):
        best = max(left, key=volumes.detach().tolist().__getitem__)
        if volumes[best] < TINY:
            break
        left.remove(best)
        beaten += [volumes[best].log()] * (best not in wanted)
        row = kernel[best] - sum(factor[best] * factor for factor in factors)
        factors.append(row / volumes[best].sqrt())
        volumes = volumes - factors[-1] ** 2
    missing = [at for at in left if at in wanted]
    if not missing or not beaten:
        return shown.rows.sum() * 0
    return F.relu(torch.stack(beaten).min() + MARGIN - volumes[missing].clamp_min(TINY / 1000).log()).sum()


def kept(shown: Shown, count: int, question: Tensor, rng: np.random.Generator) -> list[int]:
    """Mostly the default's choice; now and then CDPruner's for one of the questions, or chance among all but words."""
    luck, rows = rng.random(), shown.rows.detach().numpy()
    if count == NUM_TOKENS:
        return list(range(NUM_TOKENS))
    if luck < 0.82:
        run = Run(rows=rows, question=question.numpy(), seed=0)
        return sorted((cenprune if luck < 0.7 else cdpruner)(run, count).tolist())
    stays = shown.words()
    others = rng.permutation([at for at in range(NUM_TOKENS) if at not in stays])
    return sorted([*stays, *others[: max(0, count - len(stays))].tolist()])


def arrange(gallery: Gallery) -> None:
    """Move the learned rows, without the decoder, until the choice keeps the words."""
    rows = gallery.panel.constants
    start, optimizer = rows.detach().clone(), torch.optim.Adam([rows], lr=0.004)
    for step in range(ARRANGING):
        rng = np.random.default_rng([6, step])
        total = PULL * ((rows - start) ** 2).sum()
        for i in range(8):
            total = total + crowding(gallery.shown(rng), HALF if i % 3 == 2 else THIRD) / 8
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def losses(model: Any, gallery: Gallery, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Of the answers, and of crowding, for one caption of each count."""
    said, trees, crowded = gallery.said, [], torch.zeros(())
    for usual in COUNTS:
        shown = gallery.shown(rng)
        count = usual if rng.random() >= BY_CHANCE else int(rng.integers(9, 24))
        made = asked(shown.facts, count == NUM_TOKENS, said.spelled[: said.num_concepts], rng)
        question = gallery.table[token_ids(made[int(rng.integers(len(made)))][0])]
        stays = kept(shown, count, question, rng)
        trees.append(tune.Tree(model, shown.rows[stays], made, stays))
        if count < NUM_TOKENS:
            crowded = crowded + crowding(shown, count) / len(COUNTS)
    return tune.loss_of(model, trees), crowded


def main() -> None:
    """Start from the rows tuned whole; save the mean of the second half of the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    model = decoder.load()
    table = model.get_input_embeddings().weight.detach().float()
    panel = export.panel(table, words(), tune.CHECKPOINT).requires_grad_(False)
    panel.constants.requires_grad_(True)
    gallery = Gallery(panel, table)
    arrange(gallery)
    optimizer = torch.optim.Adam([panel.constants], lr=RATE, betas=(0.9, 0.98))
    bar, mean = tqdm(range(steps), mininterval=10), torch.zeros_like(panel.constants)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))
        answers, crowded = losses(model, gallery, np.random.default_rng([9, step]))
        optimizer.zero_grad()
        (answers + CROWDING * crowded).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([panel.constants], 1.0)
        optimizer.step()
        if step >= steps // 2:
            mean += (panel.constants.data - mean) / (step - steps // 2 + 1)
        if step % 10 == 9:
            bar.write(f"{step + 1} loss {answers.item():.4f} crowding {crowded.item():.4f}")
    torch.save({"constants": mean}, tune.DROPPED)


if __name__ == "__main__":
    main()
