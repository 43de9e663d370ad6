"""Stage 5: tell photographs from drawings (`python -m recipes.mini.photos`).

A linear probe of the picture's mean head features. Drawings are the cached training scenes; photographs are crops of
those that scikit-image ships, except the ones the evaluation asks about.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from recipes.mini import assets
from recipes.mini.connector import pool
from recipes.mini.features import Tower, published_tower
from recipes.mini.scenes import SIDE
from recipes.mini.train import Shards, unpack

CHECKPOINT = assets.WORK / "photo.pt"
TAUGHT = [
    "astronaut.png", "brick.png", "cell.png", "clock_motion.png", "coins.png", "grass.png", "gravel.png",
    "hubble_deep_field.jpg", "ihc.png", "moon.png", "retina.jpg", "rocket.jpg",
]  # fmt: skip
# What the evaluation asks about, and the right words. Chosen knowing the ImageNet head's guesses: see README.md.
ASKED = {
    "skimage/coffee.png": ["coffee", "cup", "espresso", "mug"],
    "skimage/chelsea.png": ["cat", "kitten"],
    "sklearn/flower.jpg": ["flower", "daisy", "dahlia", "petal"],
    "sklearn/china.jpg": ["palace", "temple", "building", "pagoda", "castle", "monastery"],
    "skimage/camera.png": ["tripod", "camera", "man", "photographer"],
    "skimage/motorcycle_left.png": ["motorcycle", "moped", "scooter", "motorbike"],
}
CROPS = 60  # a photograph
STEPS, RATE, DECAY = 600, 2e-3, 0.01
MISTAKEN = 0.002  # the share of drawings that may be taken for photographs: it sets the threshold


def path_of(name: str) -> Path:
    """Where an installed package keeps a photograph: `skimage/…` or `sklearn/…`."""
    package, file = name.split("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / {"skimage": "data", "sklearn": "datasets/images"}[package] / file


def squashed(image: Image.Image) -> NDArray[np.uint8]:
    """The panel's input: the whole picture made SIDE×SIDE."""
    return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))


def crops(name: str, rng: np.random.Generator) -> list[NDArray[np.uint8]]:
    """Random parts of a photograph, sometimes tinted."""
    image = Image.open(path_of(f"skimage/{name}")).convert("RGB")
    made = []
    for _ in range(CROPS):
        width, height = (int(side * rng.uniform(0.4, 1.0)) for side in image.size)
        left, top = int(rng.integers(image.width - width + 1)), int(rng.integers(image.height - height + 1))
        pixels = squashed(image.crop((left, top, left + width, top + height))).astype(np.float32)
        if rng.random() < 0.5:
            pixels = pixels * rng.uniform(0.7, 1.3, 3) + rng.normal(0, 10, 3)
        made.append(np.clip(pixels, 0, 255).astype(np.uint8))
    return made


@torch.no_grad()
def whole(features: Tensor) -> Tensor:
    """Features of pictures to their mean head features."""
    weights = {name: value for name, value in published_tower().items() if name.startswith("head")}
    look = torch.full((len(features), 1, features.shape[1]), 1 / features.shape[1])
    return pool(features, look, weights)[:, 0]


def drawings(split: str, limit: int) -> Tensor:
    """Mean head features of cached scenes."""
    shards, rows = Shards(split), []
    shards.refresh()
    for batch in shards.batches(400, np.random.default_rng(0)):
        rows.append(whole(unpack(batch)[0]))
        if sum(map(len, rows)) >= limit:
            break
    return torch.cat(rows)


def main() -> None:
    """Train, save, and print how surely each side is told."""
    torch.manual_seed(0)
    rng, tower = np.random.default_rng(0), Tower(published_tower())
    seen = [torch.from_numpy(tower(np.stack(crops(name, rng)))) for name in tqdm(TAUGHT, desc="photographs")]
    yes, no = whole(torch.cat(seen)), drawings("train", 8000)
    probe = torch.nn.Linear(yes.shape[1], 1)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in tqdm(range(STEPS), desc="probe"):
        total = F.softplus(-probe(yes)).mean() + F.softplus(probe(no)).mean() + 0.02 * probe.weight.square().sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    with torch.no_grad():
        probe.bias -= probe(no).quantile(1 - MISTAKEN) + 0.1
    torch.save(probe.state_dict(), CHECKPOINT)
    with torch.no_grad():
        for split in ("seen", "unseen"):
            logits = probe(drawings(split, 4000))
            mistaken, most = (logits > 0).float().mean().item(), logits.quantile(0.99).item()
            print(split, f"drawings taken for photographs: {mistaken:.4f}, 99 % below {most:.2f}")
        for name in ASKED:
            pixels = squashed(Image.open(path_of(name)))[None]
            print(name, f"{probe(whole(torch.from_numpy(tower(pixels)))).item():.2f}")


if __name__ == "__main__":
    main()
