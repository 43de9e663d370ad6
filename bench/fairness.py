"""Do pictures hold texts up? Four text streams alone and beside a flood of pictures, interleaved, over HTTP.

usage: python bench/fairness.py demo --json bench/results/fairness.json [--rounds 5] [-- flags of `triptych serve`]

A gap is the time between two pieces of a stream as its reader sees them. The same four questions are asked in every
round, greedily, so that the pieces are the same; each picture is new, so that each is encoded. A busy machine makes
the ratios worse than they are: how busy others kept it is written down.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import record
from PIL import Image
from record import Measure, Target
from traffic.questions import Question
from traffic.served import Served, serving
from traffic.visits import Manner, client, visit

NUM_STREAMS = 4
NUM_FLOODING = 8  # clients, each with one picture at a time
NUM_PICTURES = 1500
SIDE = 224
TOKENS, FLOOD_TOKENS = 120, 8
AT_MOST = 2.0
LOG = Path(__file__).parent / ".rivals" / "fairness.serve.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a round. gaps_s: of all streams; first_s: until each one's first piece."""

    gaps_s: list[float]
    first_s: list[float]
    pictures_s: float  # pictures answered a second


def text(number: int) -> Question:
    said = f"Tell me a long story, number {number}, about a fox, a hen and the river between them."
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return Question(kind="text", body=body)


def pictures(count: int) -> Iterator[Question]:
    for seed in range(count):
        small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG")
        url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": FLOOD_TOKENS, "temperature": 0}
        yield Question(kind="picture", body=body, has_picture=True)


async def part(http: httpx.AsyncClient, model: str, flood: Iterator[Question] | None, streams: int) -> Part:
    """Ask the text questions once, beside the flood if there is one; with none of them, the flood has six seconds."""
    answered = 0

    async def pour(source: Iterator[Question]) -> None:
        nonlocal answered
        while True:
            made = await visit(http, model, next(source), Manner(is_stream=False))
            if made.status == 429:
                await asyncio.sleep(float(made.retry_after or 1))
                continue
            if made.status != 200:
                raise RuntimeError(f"a picture got {made.status}: {made.error}")
            answered += 1

    pouring = [asyncio.create_task(pour(flood)) for _ in range(NUM_FLOODING)] if flood else []
    if pouring and streams:
        await asyncio.sleep(2.0)
    answered, began_s = 0, time.perf_counter()
    if streams:
        asked = [visit(http, model, text(number), Manner()) for number in range(streams)]
        made = await asyncio.gather(*asked)
    else:
        made = []
        await asyncio.sleep(6.0)
    took_s = time.perf_counter() - began_s
    for task in pouring:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*pouring, return_exceptions=True)
    return Part(
        gaps_s=[gap for one in made for gap in one.gaps_s],
        first_s=[one.ttft_s for one in made if one.ttft_s is not None],
        pictures_s=answered / took_s,
    )


async def measure(served: Served, rounds: int) -> dict[str, list[Part]]:
    flood = iter(list(pictures(NUM_PICTURES)))  # made beforehand: the reader must not be held up by making them
    had: dict[str, list[Part]] = {"alone": [], "beside": [], "pictures": []}
    async with client(served) as http:
        await part(http, served.model, flood, NUM_STREAMS)  # every shape once
        for number in range(rounds):
            had["alone"].append(await part(http, served.model, None, NUM_STREAMS))
            had["beside"].append(await part(http, served.model, flood, NUM_STREAMS))
            had["pictures"].append(await part(http, served.model, flood, 0))
            ratio = _p99(had["beside"][-1]) / _p99(had["alone"][-1])
            print(f"round {number + 1}: p99 {_p99(had['alone'][-1]) * 1e3:.1f} ms alone, {ratio:.2f} times beside")
    return had


def _p99(one: Part) -> float:
    return float(np.percentile(one.gaps_s, 99))


def summary(had: dict[str, list[Part]]) -> tuple[list[Measure], list[Target]]:
    found = []
    for name in ("alone", "beside"):
        for share in (50, 99):
            values = [float(np.percentile(one.gaps_s, share)) * 1e3 for one in had[name]]
            found.append(record.measure(f"gap p{share}", name, "ms", values))
        firsts = [float(np.median(one.first_s)) * 1e3 for one in had[name]]
        found.append(record.measure("first piece", name, "ms", firsts))
    for name in ("beside", "pictures"):
        found.append(record.measure("pictures answered", name, "1/s", [one.pictures_s for one in had[name]]))
    pairs = list(zip(had["beside"], had["alone"], strict=True))
    ratio = record.measure("gap p99, beside over alone", "ratio a round", "×", [_p99(b) / _p99(a) for b, a in pairs])
    target = Target(
        name="texts' gap p99 beside a flood of pictures, over alone",
        value=ratio.value,
        unit="×",
        at_most=AT_MOST,
        lowest=ratio.lowest,
        highest=ratio.highest,
    )
    return [*found, ratio], [target]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="of `triptych serve`, after --")
    asked = parser.parse_args()
    busy = record.busy_share()
    with serving(asked.model, asked.flags, LOG) as served:
        had = asyncio.run(measure(served, asked.rounds))
    found, targets = summary(had)
    for entry in found:
        spread = f"({entry.lowest:.2f} to {entry.highest:.2f})"
        print(f"{entry.name:28} {entry.subject:14} {entry.value:9.2f} {entry.unit}  {spread}")
    settings = {
        "model": asked.model,
        "flags": asked.flags,
        "rounds": asked.rounds,
        "streams": NUM_STREAMS,
        "flooding_clients": NUM_FLOODING,
        "picture_side": SIDE,
        "busy_before": round(busy, 3),
    }
    if asked.json:
        record.write(asked.json, record.record("fairness", found, targets, settings))


if __name__ == "__main__":
    main()
