"""Stage 4: train what a pooled bit of the picture is called (`python -m recipes.mini.names`), in minutes."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from recipes.mini import assets
from recipes.mini.connector import Names, pool
from recipes.mini.features import FOLDER, published_tower
from recipes.mini.prepare import concepts
from recipes.mini.train import Shards, unpack

CHECKPOINT = assets.WORK / "names.pt"
POWERS = (1.0, 2.0)  # how sharply an object's cover is looked at
EPOCHS, BATCH, RATE, DECAY, SMOOTHING = 8, 256, 1e-3, 0.1, 0.1


@torch.no_grad()
def objects(split: str) -> tuple[Tensor, Tensor]:
    """Every object of a split as pooled head features (objects, 1280), once a power, and its concept; kept on disk."""
    kept = FOLDER / f"objects-{split}.pt"
    if kept.exists():
        pooled, ids = torch.load(kept, weights_only=True)
        return pooled, ids
    weights = {name: value.bfloat16() for name, value in published_tower().items() if name.startswith("head")}
    shards, rows, labelled = Shards(split), [], []
    shards.refresh()
    for batch in tqdm(shards.batches(400, None), desc=f"pool {split}", mininterval=5):
        features, labels = unpack(batch)
        held = labels["ids"] >= 0
        for power in POWERS:
            look = labels["cover"].flatten(2) ** power + 1e-6
            found = pool(features.bfloat16(), look / look.sum(-1, keepdim=True), weights)
            rows.append(found[held].half())
            labelled.append(labels["ids"][held])
    pooled, ids = torch.cat(rows), torch.cat(labelled)
    torch.save((pooled, ids), kept)
    return pooled, ids


@torch.no_grad()
def right(model: Names, data: tuple[Tensor, Tensor]) -> float:
    """The share of objects named right."""
    model.eval()
    share = (model(data[0].float()).argmax(-1) == data[1]).float().mean().item()
    model.train()
    return share


def main() -> None:
    """Train from nothing and save."""
    torch.manual_seed(0)
    pooled, ids = objects("train")
    held = {split: objects(split) for split in ("seen", "unseen")}
    model = Names(len(concepts())).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    rng, steps, step = np.random.default_rng(0), EPOCHS * -(-len(ids) // BATCH), 0
    for epoch in tqdm(range(EPOCHS), desc="epochs"):
        for index in torch.from_numpy(rng.permutation(len(ids))).split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(pooled[index].bfloat16())
            total = F.cross_entropy(logits.float(), ids[index], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
        shares = {split: round(right(model, data), 4) for split, data in held.items()}
        tqdm.write(f"{epoch + 1}: {len(ids)} objects, loss {total.item():.3f}, {shares}")
    torch.save(model.state_dict(), CHECKPOINT)


if __name__ == "__main__":
    main()
