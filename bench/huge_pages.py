"""What huge pages give: the bare paged decoder with and without, a fresh process a turn, interleaved.

usage: python bench/huge_pages.py BUNDLE --json bench/results/huge_pages.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import record

from triptych.backends import ov
from triptych.backends.base import PagedDecoder, Placement
from triptych.backends.hugepages import LATER_S

PROMPT = 128  # tokens before the measured ones
BATCHES = (1, 16)


def step(decoder: PagedDecoder, batch: int, past: int, count: int) -> None:
    """Compute `count` tokens of each of `batch` sequences after `past`."""
    blocks = -(-(past + count) // 32)
    hidden = decoder._inputs["embeddings"].get_partial_shape()[1].get_length()  # type: ignore[attr-defined]
    embeddings = np.random.default_rng(0).standard_normal((batch * count, hidden), np.float32) * 0.05
    decoder(
        {
            "embeddings": embeddings,
            "position_ids": np.tile(np.arange(past, past + count), batch),
            "past_lens": np.full(batch, past),
            "subsequence_begins": np.arange(batch + 1) * count,
            "block_indices": np.concatenate([np.arange(row * 16, row * 16 + blocks) for row in range(batch)]),
            "block_indices_begins": np.arange(batch + 1) * blocks,
            "max_context_len": np.array(past + count),
            "sampled": np.arange(1, batch + 1) * count - 1,
        }
    )


def one(bundle: Path, is_huge: bool) -> None:
    """Print tokens a second for each batch, in a process of its own."""
    if not is_huge:
        ov.LARGE = 1 << 60
    decoder = ov.open_decoder(bundle / "decoder.xml", Placement(num_threads=2), "u8")
    time.sleep(LATER_S + 1.0)
    decoder.allocate(16 * max(BATCHES))
    for batch in BATCHES:
        step(decoder, batch, 0, PROMPT)
        for past in range(PROMPT, PROMPT + 20):
            step(decoder, batch, past, 1)
        began = time.perf_counter()
        for past in range(PROMPT + 20, PROMPT + 148):
            step(decoder, batch, past, 1)
        print(128 * batch / (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", choices=["huge", "small"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        return one(asked.bundle, asked.one == "huge")
    had: dict[tuple[str, int], list[float]] = {(kind, batch): [] for kind in ("small", "huge") for batch in BATCHES}
    for _ in range(asked.rounds):
        for kind in ("small", "huge"):
            command = [sys.executable, __file__, str(asked.bundle), "--one", kind]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            for batch, value in zip(BATCHES, said, strict=True):
                had[kind, batch].append(float(value))
    found = [record.measure(f"decode {batch}", f"{kind} pages", "tokens/s", had[kind, batch]) for kind, batch in had]
    found += [
        record.measure(
            f"decode {batch}, huge over small",
            "ratio a round",
            "×",
            [huge / small for huge, small in zip(had["huge", batch], had["small", batch], strict=True)],
        )
        for batch in BATCHES
    ]
    for entry in found:
        print(f"{entry.name:28} {entry.subject:14} {entry.value:8.2f} ({entry.lowest:.2f} to {entry.highest:.2f})")
    if asked.json:
        record.write(asked.json, record.record("huge pages", found, settings={"rounds": asked.rounds}))


if __name__ == "__main__":
    main()
