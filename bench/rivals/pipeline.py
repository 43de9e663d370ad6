"""The demo as its training recipe runs it: torch's vision panel, transformers' decoder in bf16, one answer at a time.

usage: pipeline.py REQUESTS.json   (in recipes/mini's environment; prints one JSON object)

Each request: prompt_tokens (of text), answer_tokens, images, side (width, height). The same sizes as `bench saving`
asks, random words and pictures, answers of exact lengths. What is counted is counted as triptych/session/traffic does.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import psutil
import torch
from PIL import Image
from recipes.mini import decoder, photos, tower
from recipes.mini.caption import words
from recipes.mini.export import panel
from recipes.mini.features import published_tower

NUM_THREADS = 2
WARM = 3  # requests before it is counted


class Pipeline:
    def __init__(self) -> None:
        torch.set_num_threads(NUM_THREADS)
        self._model = decoder.load()
        self._weights = published_tower()
        self._panel = panel(self._model.get_input_embeddings().weight.detach(), words())

    @torch.no_grad()
    def answer(self, request: dict[str, Any], rng: np.random.Generator) -> None:
        ids = torch.from_numpy(rng.integers(100, 49_000, request["prompt_tokens"]))
        table = self._model.get_input_embeddings().weight
        rows = [table[ids]]
        for _ in range(request["images"]):
            width, height = request["side"]
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            pixels = torch.from_numpy(photos.squashed(image)[None])
            rows.insert(0, self._panel(tower.features(pixels, self._weights))[0].to(table.dtype))
        inputs, new = torch.cat(rows)[None], request["answer_tokens"]
        out = self._model.generate(
            inputs_embeds=inputs, attention_mask=torch.ones(inputs.shape[:2], dtype=torch.long), do_sample=False,
            max_new_tokens=new, min_new_tokens=new, pad_token_id=decoder.END_ID,
        )  # fmt: skip
        if out.shape[1] != new:
            raise SystemExit(f"{out.shape[1]} tokens instead of {new}")


def main() -> None:
    requests, rng = json.loads(Path(sys.argv[1]).read_text()), np.random.default_rng(0)
    pipeline, own = Pipeline(), psutil.Process()
    for request in requests[:WARM]:
        pipeline.answer(request, rng)
    peak, done = [own.memory_info().rss], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak.append(own.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    before, started, latencies = own.cpu_times(), time.perf_counter(), []
    for request in requests:
        began = time.perf_counter()
        pipeline.answer(request, rng)
        latencies.append(time.perf_counter() - began)
    wall_s, after = time.perf_counter() - started, own.cpu_times()
    done.set()
    watching.join()
    found = {
        "cpu_s": after.user + after.system - before.user - before.system, "wall_s": wall_s, "peak_bytes": max(peak),
        "latency_p95_s": float(np.percentile(latencies, 95)),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
