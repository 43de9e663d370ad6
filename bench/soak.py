"""Many requests, a third of them left mid-stream, pictures among them: is everything given back, is memory flat?

usage: python bench/soak.py [BUNDLE|demo] --json bench/results/soak.json [--requests 1000]

Refuses (exit 1) when a KV block or an encoder reference is still held at the end, an answer failed, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import record
from PIL import Image, ImageDraw
from rich.console import Console
from rich.progress import Progress

from triptych import Session
from triptych.core.chat import Chat, ImagePart, Message, Part, TextPart
from triptych.core.request import FinishReason, Sampling
from triptych.engine.config import EngineConfig
from triptych.engine.loop import EngineStats
from triptych.errors import TriptychError

CONCURRENCY = 24  # more than run at once, so that some wait
NUM_PICTURES = 40  # seen again and again: hits, misses and evictions
WARM_SHARE = 0.3  # of the requests, before memory is expected to stand still
GROWTH = 0.05  # of the resident size after that
SAMPLE_EVERY = 5
KV_BYTES = 48 << 20
ENCODER_BYTES = 512 << 10
WORDS = ("river", "bridge", "bread", "winter", "music", "garden", "train", "moon", "stone", "paper", "window", "horse")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What happened so far."""

    num_done: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)  # bytes, ours and the decoder processes', every fifth request


def picture(seed: int) -> bytes:
    rng = random.Random(seed)
    image = Image.new("RGB", (rng.randint(60, 700), rng.randint(60, 700)), tuple(rng.choices(range(256), k=3)))
    box = (10, 10, image.width // 2, image.height // 2)
    ImageDraw.Draw(image).ellipse(box, fill=tuple(rng.choices(range(256), k=3)))
    file = io.BytesIO()
    image.save(file, rng.choice(["PNG", "JPEG"]))
    return file.getvalue()


def question(rng: random.Random, pictures: list[bytes]) -> Chat:
    """Text alone in half the cases; some prompts begin alike, so that blocks are shared."""
    words = " ".join(rng.choices(WORDS, k=rng.choice([5, 30, 150])))
    parts: list[Part] = [TextPart(text=f"Here are some words: {words}. What are they about?")]
    if pictures and rng.random() < 0.5:
        parts[:0] = [ImagePart(source=rng.choice(pictures)) for _ in range(rng.choice([1, 1, 2]))]
    system = Message(role="system", parts=(TextPart(text="You answer briefly. " * rng.choice([1, 12])),))
    return Chat(messages=(system, Message(role="user", parts=tuple(parts))))


async def visit(session: Session, number: int, pictures: list[bytes], tally: Tally) -> None:
    """One request; every third is left: before its first token, in the middle, or by a plain abort."""
    rng = random.Random(number)
    sampling = Sampling(
        max_tokens=rng.randint(8, 40), temperature=rng.choice([0.0, 1.0]), seed=number, ignore_eos=rng.random() < 0.5
    )
    leave_after = rng.choice([0, 1, 3, 6]) if number % 3 == 0 else None
    try:
        prompt = await asyncio.to_thread(session.prepare_chat, question(rng, pictures))
        stream = session.start(prompt, sampling, request_id=f"soak-{number}")
        seen = 0
        finish: FinishReason | None = None
        if leave_after == 0:
            await asyncio.sleep(rng.random() * 0.05)
            stream.abort()
        async for delta in stream:
            finish = delta.finish
            seen += 1
            if leave_after and seen >= leave_after and finish is None:
                finish = FinishReason.ABORT
                break
        tally.finished["none" if finish is None else finish.value] += 1
    except TriptychError as error:
        tally.errors.append(f"{number}: {error}")
    tally.num_done += 1
    if tally.num_done % SAMPLE_EVERY == 0:
        tally.resident.append(resident_bytes())


def resident_bytes() -> int:
    ours = psutil.Process()
    total: int = ours.memory_info().rss
    for child in ours.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return total


async def soak(session: Session, count: int, tally: Tally) -> None:
    has_eyes = session.manifest.spec.vision is not None
    pictures = [picture(seed) for seed in range(NUM_PICTURES)] if has_eyes else []
    gate = asyncio.Semaphore(CONCURRENCY)

    async def guarded(number: int) -> None:
        async with gate:
            await visit(session, number, pictures, tally)
            bar.update(task, completed=tally.num_done)

    with Progress() as bar:
        task = bar.add_task("requests", total=count)
        await asyncio.gather(*(guarded(number) for number in range(count)))
    for _ in range(200):  # an abort is heard at the next step
        if session.stats().num_running == session.stats().num_waiting == 0:
            break
        await asyncio.sleep(0.05)


def warm_part(tally: Tally) -> list[int]:
    return tally.resident[int(len(tally.resident) * WARM_SHARE) :]


def judge(stats: EngineStats, tally: Tally, count: int) -> list[record.Target]:
    aborted = stats.finished.get("abort", 0)
    tenth = max(len(tally.resident) // 10, 1)
    warm = warm_part(tally)
    growth = statistics.median(warm[-tenth:]) / statistics.median(warm[:tenth]) - 1
    zero = {"at_most": 0.0, "unit": ""}
    return [
        record.Target(name="requests that failed", value=len(tally.errors), **zero),
        record.Target(name="blocks not given back", value=stats.num_blocks - stats.free_blocks, **zero),
        record.Target(name="encoder references not given back", value=stats.held_features, **zero),
        record.Target(name="requests unfinished", value=stats.num_running + stats.num_waiting, **zero),
        record.Target(name="share aborted", value=aborted / count, unit="", at_least=0.3),
        record.Target(name="memory growth after warm-up", value=100 * growth, unit="%", at_most=100 * GROWTH),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    asked, console, tally = parser.parse_args(), Console(), Tally()
    # few blocks, and room for a few pictures only: preemption and eviction are soaked too
    config = EngineConfig(
        max_num_seqs=16, max_model_len=2048, kv_cache_bytes=KV_BYTES, encoder_cache_bytes=ENCODER_BYTES
    )
    started = time.perf_counter()
    with Session.open(asked.model, config=config) as session:
        asyncio.run(soak(session, asked.requests, tally))
        stats = session.stats()
    seconds = time.perf_counter() - started
    aims = judge(stats, tally, asked.requests)
    for aim in aims:
        console.print(f"{'ok  ' if aim.is_met else 'BAD '} {aim.name}: {aim.value:.3g} {aim.unit}", highlight=False)
    for error in tally.errors[:5]:
        console.print(f"     {error}", markup=False)
    found = [
        record.measure("resident size", "after warm-up", "B", warm_part(tally)),
        record.measure("requests", "all", "requests/s", [asked.requests / seconds]),
    ]
    facts = {
        "requests": asked.requests, "concurrency": CONCURRENCY, "seen_by_client": dict(tally.finished),
        "finished": dict(stats.finished), "preemptions": stats.preemptions, "prefix_hit_tokens": stats.prefix_hits,
        "encoder_queries": stats.encoder_queries, "encoder_hits": stats.encoder_hits, "steps": stats.steps,
        "resident_bytes_each_tenth": tally.resident[:: max(len(tally.resident) // 10, 1)],
    }  # fmt: skip
    if asked.json:
        record.write(asked.json, record.record("soak", found, aims, facts))
    if not all(aim.is_met for aim in aims):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
