"""Stage 3 (B): tune the caption's constant rows through the frozen decoder (`python -m recipes.mini.tune --steps 300`).

No picture is needed: captions are spelled from random facts. The questions about one picture share its caption.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from recipes.mini import assets, decoder
from recipes.mini.caption import NUM_TOKENS, SLOTS, Words, spell, token_ids, words
from recipes.mini.questions import NUMBERS, UNKNOWN, Facts, pairs
from recipes.mini.scenes import COLOUR_NAMES

CHECKPOINT = assets.WORK / "constants.pt"
DROPPED = assets.WORK / "constants-dropped.pt"  # what drop.py makes of it
PICTURES = 3  # a step
RATE = 1.5e-2
SAVE_EVERY = 20  # steps


def imagine(said: Words, rng: np.random.Generator) -> Facts:
    """Facts of a scene, or now and then of a photograph."""
    if rng.random() < 0.25:
        name = str(rng.choice(said.spelled[said.num_concepts :]))
        return Facts(photo=True, names=(name,), colour=UNKNOWN, count=UNKNOWN)
    count = int(rng.choice([1, 2, 3, 4], p=[0.4, 0.2, 0.2, 0.2]))
    names = tuple(str(n) for n in rng.choice(said.spelled[: said.num_concepts], count, replace=False))
    return Facts(photo=False, names=names, colour=str(rng.choice(COLOUR_NAMES)), count=NUMBERS[count])


class Tree:
    """Token rows of one picture: its caption is the trunk, questions with answers are branches blind to each other.

    visual: the caption's rows that stand there, at the places `kept`.
    """

    def __init__(
        self, model: Any, visual: Tensor, made: list[tuple[str, str]], kept: Sequence[int] = range(NUM_TOKENS)
    ) -> None:
        table = model.get_input_embeddings().weight
        ids, branch, position, targets = [], [-1] * len(kept), list(kept), [-100] * len(kept)
        for b, (question, answer) in enumerate(made):
            prompt = token_ids(question + decoder.AFTER_QUESTION)
            reply = [*token_ids(answer), decoder.END_ID]
            ids += prompt + reply[:-1]
            branch += [b] * (len(prompt) + len(reply) - 1)
            position += range(NUM_TOKENS, NUM_TOKENS + len(prompt) + len(reply) - 1)
            targets += [-100] * (len(prompt) - 1) + reply
        self.rows = torch.cat([visual.to(table.dtype), table[ids]])
        self.branch, self.position, self.targets = (torch.tensor(x) for x in (branch, position, targets))

    def mask(self) -> Tensor:
        """Who may see whom (tokens, tokens)."""
        mine, other = self.branch[:, None], self.branch[None]
        return ((other == -1) | (mine == other)) & torch.ones(len(self.branch), len(self.branch)).tril().bool()


def past(model: Any, size: int) -> tuple[Any, int]:
    """The keys and values of what stands before every picture, for `size` pictures."""
    from transformers import DynamicCache

    before = decoder.embed(model, decoder.BEFORE_PICTURE)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model.model(inputs_embeds=before[None].expand(size, -1, -1), cache=cache, use_cache=True)
    return cache, len(before)


def loss_of(model: Any, trees: list[Tree]) -> Tensor:
    """Mean cross-entropy of the answers."""
    longest = max(len(tree.rows) for tree in trees)
    cache, offset = past(model, len(trees))
    pad = [longest - len(tree.rows) for tree in trees]
    rows = torch.stack([F.pad(tree.rows, (0, 0, 0, p)) for tree, p in zip(trees, pad, strict=True)])
    targets = torch.stack([F.pad(tree.targets, (0, p), value=-100) for tree, p in zip(trees, pad, strict=True)])
    position = torch.stack([F.pad(tree.position, (0, p)) for tree, p in zip(trees, pad, strict=True)]) + offset
    seen = torch.stack([F.pad(tree.mask(), (0, p, 0, p)) for tree, p in zip(trees, pad, strict=True)])
    seen |= torch.eye(longest, dtype=torch.bool)
    allowed = torch.cat([torch.ones(len(trees), longest, offset, dtype=torch.bool), seen], -1)
    bias = torch.zeros(allowed.shape, dtype=rows.dtype).masked_fill(~allowed, -1e9)[:, None]
    out = model.model(inputs_embeds=rows, attention_mask=bias, position_ids=position, cache=cache, use_cache=True)
    hidden = out.last_hidden_state[targets != -100]
    return F.cross_entropy(model.lm_head(hidden).float(), targets[targets != -100])


def main() -> None:
    """Tune, save every SAVE_EVERY steps, go on from the last save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=320)
    steps = parser.parse_args().steps
    said, model = words(), decoder.load()
    table = model.get_input_embeddings().weight
    start = table[said.constants].float().clone()
    constants, step = torch.nn.Parameter(start.clone()), 0
    optimizer = torch.optim.Adam([constants], lr=RATE, betas=(0.9, 0.98))
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        constants.data.copy_(saved["constants"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    bar = tqdm(total=steps, initial=step, mininterval=10)
    while step < steps:
        rng = np.random.default_rng([5, step])
        trees = []
        for _ in range(PICTURES):
            facts = imagine(said, rng)
            made = pairs(facts, said.spelled[: said.num_concepts], rng)
            places = [0] if facts.photo else sorted(rng.permutation(SLOTS)[: len(facts.names)].tolist())
            trees.append(Tree(model, spell(facts, places, said, table, constants), made))
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / steps))
        total = loss_of(model, trees)
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([constants], 1.0)
        optimizer.step()
        step += 1
        bar.update()
        if step % 5 == 0:
            moved, whole = ((constants - start).norm(dim=-1).mean().item(), start.norm(dim=-1).mean().item())
            bar.write(f"{step} loss {total.item():.4f} moved {moved:.3f} of {whole:.3f}")
        if step % SAVE_EVERY == 0 or step == steps:
            torch.save({"constants": constants.data, "optimizer": optimizer.state_dict(), "step": step}, CHECKPOINT)


if __name__ == "__main__":
    main()
