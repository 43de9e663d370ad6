"""Stage 1: fetch the packages and draw every concept in every style (`python -m recipes.mini.prepare`)."""

from __future__ import annotations

import json
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from tqdm import tqdm

from recipes.mini import assets
from recipes.mini.artwork import SPRITE, Sprite, draw

CONCEPTS = Path(__file__).parent / "concepts.json"
SPRITES = assets.WORK / "sprites.npz"


def concepts() -> list[dict[str, str]]:
    """The concepts in their fixed order: `emoji` and `name`."""
    rows: list[dict[str, str]] = json.loads(CONCEPTS.read_text())
    return rows


def job(task: tuple[str, str]) -> Sprite | None:
    """One drawing, for a worker."""
    try:
        return draw(*task)
    except ValueError:  # an SVG the renderer does not accept
        return None


def main() -> None:
    """Write `sprites.npz`: sprites (concepts, styles, SPRITE, SPRITE, 4) and which of them exist."""
    assets.fetch()
    rows = concepts()
    tasks = [(style, row["emoji"]) for row in rows for style in assets.STYLES]
    with Pool(2) as pool:
        drawn = list(tqdm(pool.imap(job, tasks, chunksize=32), total=len(tasks), desc="sprites"))
    shape = (len(rows), len(assets.STYLES))
    has = np.array([d is not None for d in drawn]).reshape(shape)
    blank = np.zeros((SPRITE, SPRITE, 4), np.uint8)
    sprites = np.stack([blank if d is None else d for d in drawn]).reshape(*shape, SPRITE, SPRITE, 4)
    np.savez_compressed(SPRITES, sprites=sprites, has=has)
    print(dict(zip(assets.STYLES, has.sum(0).tolist(), strict=True)))


if __name__ == "__main__":
    main()
