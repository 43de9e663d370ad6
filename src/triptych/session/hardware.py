"""This machine, measured; and what a bundle does on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from triptych.backends.base import Placement
from triptych.core.device import DeviceSpec, Figure
from triptych.core.progress import Progress, silent
from triptych.core.spec import Fact
from triptych.core.traffic import Traffic
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.engine.config import EngineConfig
from triptych.plan.measure import describe, questions
from triptych.plan.points import complete
from triptych.plan.system import read_system
from triptych.session.jobs import random_png
from triptych.session.session import Session
from triptych.session.traffic import processors_s, serve

REPEATS = 3
NUM_PICTURES = 9
SIDE = (448, 448)  # pixels of a picture
PROMPT, ANSWER = 128, 64  # tokens


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_machine(name: str | None = None, progress: Progress = silent) -> DeviceSpec:
    """Time this machine, about a minute. Raises MeasurementError where it was disturbed, BackendError."""
    from triptych.backends import ov
    from triptych.backends.probe import probe

    system = read_system()
    asked = questions(system, [device for device in ov.devices() if device != "cpu:0"])
    probed = probe(asked, Placement(), Others(), progress)
    return describe(probed, system, name or f"{system.cpu}, {len(system.cpus)} cores")


class Others:
    """What share of the processors others had, from one call to the next."""

    def __init__(self) -> None:
        self._last = self._ticks()

    def __call__(self) -> float:
        now = self._ticks()
        total, busy, own = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return max(0.0, busy - own) / max(total, 1e-9)

    def _ticks(self) -> tuple[float, float, float]:
        """Seconds of all processors, of those in use, and of those that this process used."""
        mine = psutil.Process().cpu_times()
        return *processors_s(), mine.user + mine.system


# ── a bundle on it ───────────────────────────────────────────────────────────────────────────────────────────────────


class Row(Fact, frozen=True, kw_only=True):
    """One line of the platform table."""

    name: str
    unit: str
    figure: Figure


class Platform(Fact, frozen=True, kw_only=True):
    """What a bundle does on this machine."""

    bundle: str
    weights_digest: str
    place: str  # of the decoder, in its runtime's words
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def bench_bundle(model: str | Path, config: EngineConfig, progress: Progress = silent) -> Platform:
    """Raises what `Session.open` raises, and MeasurementError for requests that failed."""
    with Session.open(model, config=config) as session:
        return bench_session(session, progress)


def bench_session(session: Session, progress: Progress = silent) -> Platform:
    """Pictures first, then answers alone and together, then what memory gives."""
    rows = [*_pictures(session, progress), *_answers(session, progress)]
    manifest = session.manifest
    part = manifest.part("decoder")
    num_bytes = 0 if part is None else manifest.num_bytes(part)
    alone = next(row.figure for row in rows if row.name == "tokens a second, one answer")
    used, memory = alone.times(num_bytes), _memory()
    rows += [
        Row(name="decoder's weights read, one answer", unit="GB/s", figure=used.times(1e-9)),
        Row(name="memory gives", unit="GB/s", figure=memory.times(1e-9)),
        Row(name="bandwidth used", unit="%", figure=used.times(100 / memory.value)),
    ]
    return Platform(
        bundle=manifest.name, weights_digest=manifest.weights_digest, place=session.placements()["decoder"],
        rows=tuple(rows),
        notes=(
            f"pictures of {SIDE[0]} × {SIDE[1]} pixels, {NUM_PICTURES} different ones, one at a time",
            f"prompts of {PROMPT} tokens, answers of {ANSWER}, {REPEATS} runs each",
            f"the decoder has {num_bytes:,} B of weights; what attention reads besides is left out",
        ),
    )  # fmt: skip


def _pictures(session: Session, progress: Progress) -> Iterator[Row]:
    """Encoding, then the prefill over a picture's tokens, from the engine's own clock; and what a caller waits."""
    if session.manifest.spec.vision is None:
        return
    random = np.random.default_rng(0)
    encode, prefill, first, share = [], [], [], ""
    for index in range(NUM_PICTURES + 1):
        before = session.stats().stage_seconds
        picture, began = random_png(random, SIDE), time.perf_counter()
        answer = session.ask("What is this?", images=[picture], max_tokens=1)
        taken = time.perf_counter() - began
        after = session.stats().stage_seconds
        spent = {stage: after.get((stage, "image"), 0.0) - before.get((stage, "image"), 0.0)
                 for stage in ("encode", "project", "prefill")}  # fmt: skip
        if index:  # the first opens the encoder
            encode.append(spent["encode"] + spent["project"])
            prefill.append(spent["prefill"])
            first.append(taken)
            share = f"{answer.usage.image_tokens} image tokens of {answer.usage.prompt_tokens}"
        progress("pictures", (index + 1) / (NUM_PICTURES + 1))
    yield Row(name="vision encode", unit="images/s", figure=Figure.of([1 / seconds for seconds in encode]))
    yield Row(name=f"prefill, {share}", unit="ms", figure=Figure.of([1e3 * one for one in prefill]))
    yield Row(name="picture to first token", unit="ms", figure=Figure.of([1e3 * one for one in first]))


def _answers(session: Session, progress: Progress) -> Iterator[Row]:
    for at_once, words in ((1, "one answer"), (min(16, session.plan.max_num_seqs), "together, prompts' time included")):
        works = [_workload(at_once, seed) for seed in range(REPEATS)]
        runs = [complete(serve(session, work, progress=progress)) for work in works]
        name = f"tokens a second, {words if at_once == 1 else f'{at_once} {words}'}"
        yield Row(name=name, unit="tokens/s", figure=Figure.of([_rate(run, at_once) for run in runs]))


def _rate(run: Traffic, at_once: int) -> float:
    """Alone: of the tokens after the first, without the prompt's time. Together: all tokens over all the time."""
    if at_once > 1:
        return run.tokens_per_s
    return 1 / statistics.median(one.tpot_s for one in run.answered if one.tpot_s)


def _workload(at_once: int, seed: int) -> Workload:
    kind = RequestKind(name="text", share=1, prompt=Sizes.exactly(PROMPT), answer=Sizes.exactly(ANSWER))
    return Workload(name=f"{at_once} at once", kinds=(kind,), arrivals="closed", concurrency=at_once,
                    num_requests=max(2, at_once), seed=seed)  # fmt: skip


def _memory() -> Figure:
    """Bytes a second that all processors read now: it drifts, on machines that are shared."""
    from triptych.backends.probe import Reader

    system = read_system()
    num_bytes = 4 * system.caches[-1].num_bytes
    reader = Reader(num_bytes, system.cpus, system.cpus)
    return Figure.of([num_bytes / reader.sample() for _ in range(5)])
