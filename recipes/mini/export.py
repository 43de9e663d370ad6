"""Stage 6: write the package data, and the small test pictures with what the reference makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save_file

from recipes.mini import decoder, names, photos, tower, train, tune
from recipes.mini.caption import NUM_TOKENS, Words, constant_sizes, words
from recipes.mini.connector import CELLS
from recipes.mini.features import published_tower
from recipes.mini.model import Panel
from recipes.mini.scenes import SIDE

ROOT = Path(__file__).parents[2]
DATA = ROOT / "src" / "triptych" / "data" / "mini"
TESTS = ROOT / "tests" / "data" / "mini"
ROWS = ("before_count", "before_colour", "before_names", "end", "pad")
Arrays = dict[str, NDArray[Any]]


def panel(table: torch.Tensor, said: Words, rows: Path = tune.DROPPED) -> Panel:
    """The trained panel, rounded to the fp16 it is shipped in."""
    made, tower_weights = Panel(said, table), published_tower()
    made.slots.load_state_dict(torch.load(train.CHECKPOINT, weights_only=True)["model"])
    made.names.load_state_dict(torch.load(names.CHECKPOINT, weights_only=True))
    made.photo.load_state_dict(torch.load(photos.CHECKPOINT, weights_only=True))
    made.constants.data = torch.load(rows, weights_only=True)["constants"].float()
    made.head.load_state_dict({"weight": tower_weights["head.weight"][:, :, 0, 0], "bias": tower_weights["head.bias"]})
    made.imagenet.load_state_dict({kind: tower_weights[f"imagenet.{kind}"] for kind in ("weight", "bias")})
    made.load_state_dict({name: value.half().float() for name, value in made.state_dict().items()})
    return made.eval()


def connector_arrays(made: Panel) -> Arrays:
    """What `connector.safetensors` holds: fp16 weights, and the ids of the words it may say."""
    state = {name: value.half().contiguous().numpy() for name, value in made.state_dict().items()}
    constants = state.pop("constants")
    ends = np.cumsum(constant_sizes())
    rows = np.split(constants, ends[:-1])
    said = made.said
    ids: dict[str, Any] = {"kinds": said.kinds, "counts": said.counts, "colours": said.colours, "joiner": said.joiner}
    ids |= {"concepts": said.names[: said.num_concepts], "classes": said.names[said.num_concepts :]}
    return (
        state
        | {f"rows.{name}": np.ascontiguousarray(row) for name, row in zip(ROWS, rows, strict=True)}
        | {f"ids.{name}": np.array(value, np.int32) for name, value in ids.items()}
        | {"groups": np.array(said.groups, np.int32), "sharpness": made.sharpness.numpy()}
    )


def facts(said: Words) -> dict[str, Any]:
    """What `mini.json` says."""
    return {
        "vision_config": {
            "image_size": SIDE,
            "resize": "squash: PIL.Image.resize((size, size), BICUBIC) of the RGB picture, proportions not kept",
            "image_mean": [tower.MEAN / 255] * 3,
            "image_std": [tower.SCALE / 255] * 3,
            "num_cells": CELLS,
            "feature_width": tower.FEATURE_WIDTH,
            "num_visual_tokens": NUM_TOKENS,
        },
        "concepts": said.spelled[: said.num_concepts],
        "classes": said.spelled[said.num_concepts :],
    }


def write_tests(made: Panel, pictures: dict[str, NDArray[np.uint8]]) -> None:
    """Features and visual tokens of a few pictures, in fp32, for graphs to be held against.

    `drawn_words` are the tokens with a table drawn at random (seed 0) in place of the decoder's: tests can draw it too.
    """
    pixels = torch.from_numpy(np.stack(list(pictures.values())))
    twin = Panel(made.said, random_table(made.words.shape[0], made.words.shape[1])).eval()
    twin.load_state_dict(made.state_dict())
    with torch.no_grad():
        features = tower.features(pixels, published_tower())
        tokens, drawn = made(features), twin(features)
    arrays = {"features": features, "embeddings": tokens, "drawn_words": drawn}
    np.savez_compressed(TESTS / "expected.npz", **{name: value.numpy() for name, value in arrays.items()})
    (TESTS / "pictures.json").write_text(json.dumps(list(pictures), indent=1) + "\n")


def random_table(rows: int, hidden: int) -> torch.Tensor:
    """A stand-in for the decoder's table."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal((rows, hidden), dtype=np.float32) * 0.1)


def main() -> None:
    """Write everything."""
    said = words()
    table = decoder.load(torch.float32).get_input_embeddings().weight.detach()
    made = panel(table, said)
    DATA.mkdir(parents=True, exist_ok=True)
    TESTS.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous().numpy() for name, value in published_tower().items()}
    save_file({n: w for n, w in weights.items() if not n.startswith(("head", "imagenet"))}, DATA / "vision.safetensors")
    save_file(connector_arrays(made), DATA / "connector.safetensors")
    (DATA / "mini.json").write_text(json.dumps(facts(said), indent=1, ensure_ascii=False) + "\n")
    found = {path.name: photos.squashed(Image.open(path)) for path in sorted(TESTS.glob("*.png"))}
    if found:
        write_tests(made, found)
    for path in sorted(DATA.iterdir()):
        print(path.name, f"{path.stat().st_size:,} B")


if __name__ == "__main__":
    main()
