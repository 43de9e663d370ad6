"""Time to first token with and without a reduction, split into encoder, selector and prefill; and selectors alone.

usage: python bench/reduction.py [--side 1024] [--keep 0.5 0.33] [--methods cenprune] [--times 5] [--json FILE]
       python bench/reduction.py --selectors

A model of SmolVLM-256M's architecture with random weights (made once, under bench/.rivals/models): 93 M parameters of
SigLIP, 64 tokens a tile after the pixel shuffle, SmolLM2-135M's decoder. A square picture is 17 tiles of 512 pixels at
the model's own --edge 2048, 5 at 1024, 1 at 512. Every question shows a picture that no cache has seen. Making the
checkpoint needs transformers and torch; serving it needs neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from record import Measure, Target, busy_share, measure, record, write

from triptych.core.policy import METHODS, Compression
from triptych.engine.config import EngineConfig
from triptych.media.reduce.reduction import BY_NAME
from triptych.media.reduce.run import Run
from triptych.session import Session, Source

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "bench" / ".rivals" / "models"
STAGES = ("encode", "project", "reduce", "prefill")
VISION = {"image_size": 512, "patch_size": 16, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
          "intermediate_size": 3072}  # fmt: skip
TEXT = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49280, "max_position_embeddings": 8192}  # fmt: skip


def checkpoint(edge: int) -> Path:
    """The checkpoint, whose pictures are scaled to `edge` pixels and cut into tiles of 512."""
    sys.path.append(str(ROOT / "tests"))
    import checkpoints

    recipe = checkpoints._RECIPES["smolvlm"]
    config = checkpoints._idefics3("smolvlm", VISION, tie_word_embeddings=True, **TEXT)
    checkpoints._RECIPES[f"smolvlm-256m-{edge}"] = dataclasses.replace(
        recipe,
        config=lambda ids: {**config(ids), "scale_factor": 4},
        preprocessor=checkpoints._idefics3_image(512, splits=True, most=edge),
        processor={"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
    )
    return checkpoints.make(f"smolvlm-256m-{edge}", MODELS, 0)


def first_token(session: Session, picture: bytes, compression: Compression) -> dict[str, float]:
    """Seconds to the first token, whole and by stage; tokens of the prompt."""
    before = dict(session.stats().stage_seconds)
    started = time.perf_counter()
    answer = session.ask("What is in the picture?", images=[picture], compression=compression, max_tokens=1)
    whole = time.perf_counter() - started
    after = session.stats().stage_seconds
    took = {stage: after.get((stage, "image"), 0.0) - before.get((stage, "image"), 0.0) for stage in STAGES}
    return {"ttft": whole, **took, "prompt_tokens": answer.usage.prompt_tokens}


def pictures(side: int) -> Any:
    rng = np.random.default_rng(0)
    while True:
        file = io.BytesIO()
        small = Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8))
        small.resize((side, side), Image.Resampling.BICUBIC).save(file, "png")
        yield file.getvalue()


Times = dict[tuple[float, str], list[dict[str, float]]]


def through_model(arguments: argparse.Namespace) -> tuple[list[Measure], list[Target]]:
    config = EngineConfig(max_model_len=4096, max_num_seqs=2, max_num_batched_tokens=2048, vision_batch=4)
    with Session.open(Source(model=checkpoint(arguments.edge)), config=config) as session:
        shown = pictures(arguments.side)
        first_token(session, next(shown), Compression())  # the encoder opens
        ways = [(1.0, "cenprune"), *((keep, method) for keep in arguments.keep for method in arguments.methods)]
        taken: Times = {way: [] for way in ways}
        for _ in range(arguments.times):  # in turn, so that a slow minute meets all alike
            for way in ways:
                compression = Compression(keep_visual=way[0], reduce=way[1])  # type: ignore[arg-type]
                taken[way].append(first_token(session, next(shown), compression))
    measures = [
        measure(name, told(way), "tokens" if name == "prompt_tokens" else "s", [each[name] for each in times])
        for way, times in taken.items()
        for name in times[0]
    ]
    for way, times in taken.items():
        stages = "  ".join(f"{name} {middle(times, name) * 1e3:8.1f} ms" for name in ("ttft", *STAGES))
        print(f"{told(way):14}  {middle(times, 'prompt_tokens'):5.0f} tokens  {stages}", flush=True)
    return measures, gains(taken)


def told(way: tuple[float, str]) -> str:
    keep, method = way
    return "all" if keep == 1 else f"{method}:{keep}"


def middle(times: list[dict[str, float]], name: str) -> float:
    return float(np.median([each[name] for each in times]))


def gains(taken: Times) -> list[Target]:
    """What a reduction wins of the time to first token, round by round, with what choosing takes of it."""
    (_, whole), *ways = taken.items()
    found = []
    for way, times in ways:
        won = [100 * (1 - each["ttft"] / base["ttft"]) for each, base in zip(times, whole, strict=True)]
        name = f"{told(way)}: time to first token won, {1e3 * middle(times, 'reduce'):.1f} ms of choosing in it"
        found.append(
            Target(name=name, value=float(np.median(won)), unit="%", at_least=0.0, lowest=min(won), highest=max(won))
        )
        print(f"{name}: {found[-1].value:.0f} % ({min(won):.0f} … {max(won):.0f})")
    return found


def selectors(times: int) -> list[dict[str, Any]]:
    """Milliseconds of each method alone, half kept, one thread's processor time and the clock's."""
    rows = []
    for num_rows, width in ((64, 576), (576, 576), (576, 2048), (576, 4096), (1024, 576), (1024, 2048), (1024, 4096)):
        made = np.random.default_rng(0).normal(1, 1, (num_rows, width)).astype("f4")
        run = Run(rows=made, question=made[:12], seed=1)
        for method in METHODS:
            clock, processor = [], []
            for _ in range(times):
                started, used = time.perf_counter(), time.process_time()
                BY_NAME[method](run, num_rows // 2)
                clock.append(time.perf_counter() - started)
                processor.append(time.process_time() - used)
            took = {"ms": min(clock) * 1e3, "cpu_ms": min(processor) * 1e3}
            rows.append({"method": method, "rows": num_rows, "width": width, **took})
        told = "  ".join(f"{row['method']} {row['ms']:.1f} ({row['cpu_ms']:.1f})" for row in rows[-len(METHODS) :])
        print(f"{num_rows:5} rows of {width:4}, ms (of the processor): {told}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="pixels of a picture's side")
    parser.add_argument("--edge", type=int, default=2048, help="what the model scales it to")
    parser.add_argument("--keep", type=float, nargs="*", default=[0.5, 0.33])
    parser.add_argument("--methods", nargs="*", default=["cenprune"], choices=METHODS)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--selectors", action="store_true", help="the methods alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"} | {
        "busy_before": busy_share()
    }
    if arguments.selectors:
        content = {"reduction": selectors(arguments.times)}
    else:
        content = record("reduction", *through_model(arguments), settings)
    if arguments.json:
        write(arguments.json, content)


if __name__ == "__main__":
    main()
