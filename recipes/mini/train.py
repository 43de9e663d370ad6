"""Stage 3: train the slots on cached features (`python -m recipes.mini.train --steps 1000`)."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from recipes.mini import assets
from recipes.mini.connector import Slots
from recipes.mini.features import FOLDER
from recipes.mini.losses import Batch, loss, score

CHECKPOINT = assets.WORK / "slots.pt"
BATCH = 128
RATE = 1.5e-3
SAVE_EVERY = 100  # steps


class Shards:
    """The cached features of a split, read once; new shards are taken in as they appear."""

    def __init__(self, split: str) -> None:
        self.split, self.read = split, dict[str, Batch]()

    def refresh(self) -> int:
        """Read shards that have appeared; how many scenes there are now."""
        for path in sorted(FOLDER.glob(f"{self.split}-[0-9]*.npz")):
            if path.name not in self.read and "partial" not in path.name:
                self.read[path.name] = {key: torch.from_numpy(value) for key, value in np.load(path).items()}
        return sum(len(batch["ids"]) for batch in self.read.values())

    def batches(self, size: int, rng: np.random.Generator | None) -> Iterator[Batch]:
        """Each scene once, at random with `rng`, else in order."""
        names = list(self.read)
        spans = [(n, i) for n in names for i in range(0, len(self.read[n]["ids"]), size // 4)]
        order = rng.permutation(len(spans)) if rng else np.arange(len(spans))
        for start in range(0, len(order), 4):
            parts = [spans[i] for i in order[start : start + 4]]
            cut = [{k: v[i : i + size // 4] for k, v in self.read[n].items()} for n, i in parts]
            yield {key: torch.cat([part[key] for part in cut]) for key in cut[0]}


def unpack(batch: Batch) -> tuple[Tensor, Batch]:
    """A cached batch as the vision part's features, and labels in the types the losses need."""
    labels = {"ids": batch["ids"].long(), "colour": batch["colour"].long(), "cover": batch["cover"].float()}
    return torch.cat([batch["cells"].float(), batch["colours"].float()], -1), labels


@torch.no_grad()
def measure(model: Slots, split: str, limit: int) -> dict[str, float]:
    """Mean scores over a split."""
    model.eval()
    shards = Shards(split)
    shards.refresh()
    rows = []
    for batch in shards.batches(200, None):
        cached, labels = unpack(batch)
        rows.append(score(model(cached), labels))
        if sum(len(r["count"]) for r in rows) >= limit:
            break
    model.train()
    return {key: round(torch.cat([row[key] for row in rows]).mean().item(), 4) for key in rows[0]}


def rate_at(step: int, steps: int) -> float:
    """Warm-up over 50 steps, then a cosine to zero."""
    return RATE * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main() -> None:
    """Train, save every SAVE_EVERY steps, go on from the last save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = Slots().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05, betas=(0.9, 0.98))
    step, shards = 0, Shards("train")
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    bar, begun = tqdm(total=steps, initial=step, mininterval=10), time.time()
    while step < steps:
        scenes = shards.refresh()
        for batch in shards.batches(BATCH, rng):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, steps)
            cached, labels = unpack(batch)
            with torch.autocast("cpu", torch.bfloat16):
                seen = model(cached)
            total, parts = loss(seen, labels)
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            bar.update()
            if step % 20 == 0:
                said = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
                bar.write(f"{step}: {scenes} scenes, {time.time() - begun:.0f} s, {said}")
            if step % SAVE_EVERY == 0 or step == steps:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, CHECKPOINT)
                bar.write(f"{step} seen {measure(model, 'seen', 1000)} unseen {measure(model, 'unseen', 1000)}")
            if step >= steps or (step % 100 == 0 and step < 500):
                break  # early on, look for new shards often


if __name__ == "__main__":
    main()
