"""Stage 5 (B): tune the rows once more, with rows left out as the server does (`python -m recipes.mini.drop`).

First, without the decoder, the learned rows are moved until the choice keeps the words (`crowding`). Then answers are
taught; each step shows three captions, all rows, a half and a third, places kept, and one long conversation (talk.py).
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from recipes.mini import decoder, export, talk, tune
from recipes.mini.caption import NUM_TOKENS, token_ids, words
from recipes.mini.gallery import Gallery, Shown
from recipes.mini.questions import ASKED, Facts, answer
from triptych.media.reduce.diversity import cdpruner, cenprune
from triptych.media.reduce.run import Run

HALF, THIRD = NUM_TOKENS // 2, round(NUM_TOKENS * 0.33)
COUNTS = (NUM_TOKENS, HALF, THIRD)  # rows of a step's captions
BY_CHANCE = 0.1  # of the steps' captions have any count
RATE, CROWDING = 0.01, 0.3
MARGIN = 0.35  # by which a word's log volume is to lead
ARRANGING, PULL = 150, 0.02  # steps without the decoder; what a squared move costs
TINY = 1e-6  # as the server's


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
    """Of the answers, for one caption of each count and in one conversation; and of crowding."""
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
    return tune.loss_of(model, trees) + talk.loss(model, gallery, rng), crowded


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
