"""Real steps of an open session, measured: answers by number and context, prompts, pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import numpy as np
import psutil

from triptych.backends.base import BLOCK_TOKENS
from triptych.core.device import CostPoint
from triptych.core.progress import Progress, silent
from triptych.core.spec import Fact
from triptych.core.traffic import Traffic
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import MeasurementError
from triptych.plan.costs import SeenStep
from triptych.session.jobs import Job, exactly, jobs, words
from triptych.session.session import Session
from triptych.session.traffic import processors_s, run

CONTEXTS = ((34, (1, 2, 4, 8, 16, 32)), (258, (1, 4, 12)), (1026, (1, 3)))  # tokens, and who has so many at once
PROMPTS = (8, 32, 64, 128, 256, 512)  # tokens; a context is blocks of 32 and 2 more: what is cached of it is all but 2
ANSWER = 17  # tokens of an answer, from the first to the last of which time is taken
REPEATS = 3
SIDES = ((448, 448), (900, 600))  # of pictures, in pixels
WORDS = 7  # first seed
MOST_OTHERS = 0.04  # of the processors, that others may have had during a run that counts
TICK_S = 0.02  # that the kernel's books may be behind
TRIES = 4  # to find such a run
QUIET = "end what else runs here, then measure again"


class Seen(Fact, frozen=True, kw_only=True):
    """All that was measured. tiles: seconds from a picture's arrival until its prompt is computed."""

    steps: tuple[SeenStep, ...]
    tiles: tuple[CostPoint, ...]


def see(session: Session, progress: Progress = silent) -> Seen:
    """Run real requests, half a minute for a small model. Raises MeasurementError.

    Nothing else should run meanwhile.
    """
    room_of_all = session.plan.num_blocks * BLOCK_TOKENS
    room = min(session.plan.max_model_len, room_of_all)
    contexts = [(tokens, most) for tokens, most in CONTEXTS if tokens + ANSWER <= room]
    prompts = {tokens: seen for tokens in PROMPTS if tokens < room if (seen := _prompt(session, tokens))}
    steps = [SeenStep(prompt=tokens, seconds=seen) for tokens, seen in prompts.items()]
    for index, (tokens, counts) in enumerate(contexts):
        progress("answers", index / len(contexts))
        fitting = [n for n in counts if n <= session.plan.max_num_seqs and n * (tokens + ANSWER) <= room_of_all]
        steps += _answers(session, tokens, fitting)
    progress("answers", 1.0)
    step = session.plan.max_num_batched_tokens
    if 2 * step <= room and step in prompts:
        whole = _prompt(session, 2 * step)
        first_s = median(prompts[step])
        rest = tuple(more for seconds in whole if (more := seconds - first_s) > first_s / 2)  # the later see more
        if 2 * len(rest) < len(whole):
            took = f"{median(whole):.3g} s, one of {step:,} {first_s:.3g} s"
            raise MeasurementError(f"a prompt of {2 * step:,} tokens took {took}", hint=QUIET)
        steps.append(SeenStep(prompt=step, earlier=step, seconds=rest))
    return Seen(steps=tuple(steps), tiles=tuple(_tiles(session, steps)))


def _prompt(session: Session, tokens: int) -> tuple[float, ...]:
    """Time to first token of prompts that share nothing, the first left out.

    Each after steps of answers, as in traffic: OpenVINO takes up to twice as long for a shape that it did not just see.
    """
    seeds = itertools.count(WORDS + 1000 * tokens)

    def alone() -> Traffic:
        return _wave(session, [_words(session, tokens, next(seeds))], callers=1, answer=4)

    alone()
    return tuple(_first_s(undisturbed(alone))[0] for _ in range(REPEATS))


def _answers(session: Session, tokens: int, counts: Sequence[int]) -> Iterator[SeenStep]:
    """So many at once, whose prompts are cached already: they begin together."""
    prompts = [_words(session, tokens, WORDS + seed) for seed in range(max(counts, default=0))]
    _wave(session, prompts, callers=1, answer=1)
    for n in counts:
        _wave(session, prompts[:n], callers=n, answer=4)
        wave = partial(_wave, session, prompts[:n], callers=n, answer=ANSWER)
        runs = [undisturbed(wave) for _ in range(REPEATS)]
        each = tuple(median(one.tpot_s or 0.0 for one in traffic.served) for traffic in runs)
        yield SeenStep(answers=n, cached=n * (tokens + ANSWER // 2), seconds=each)


def _tiles(session: Session, steps: Sequence[SeenStep]) -> Iterator[CostPoint]:
    """What a picture adds to the time of its prompt, by its tiles: preparing and encoding it."""
    if session.manifest.spec.vision is None:
        return
    lengths = sorted((step.prompt, median(step.seconds)) for step in steps if step.prompt and not step.earlier)
    seen: dict[int, list[float]] = {0: [0.0]}
    seeds = itertools.count(WORDS)
    for side in SIDES:
        traffic = undisturbed(partial(_pictures, session, side, seeds))
        for one, first_s in list(zip(traffic.served, _first_s(traffic), strict=True))[1:]:
            prompt_s = float(np.interp(one.prompt_tokens, [size for size, _ in lengths], [s for _, s in lengths]))
            seen.setdefault(one.tiles, []).append(max(0.0, first_s - prompt_s))
    for tiles, each in sorted(seen.items()):
        yield CostPoint(size=tiles, seconds=median(each), lowest_s=min(each), highest_s=max(each))


def _pictures(session: Session, side: tuple[int, int], seeds: Iterator[int]) -> Traffic:
    """One after another, each with a prompt of its own."""
    kind = RequestKind(name="picture", share=1, prompt=_same(64), answer=_same(1), images=1, image_side=side)
    workload = Workload(
        name="pictures",
        kinds=(kind,),
        arrivals="closed",
        concurrency=1,
        num_requests=REPEATS + 1,
        seed=next(seeds),
    )
    return run(session, workload, jobs(session, workload))


def undisturbed(traffic: Callable[[], Traffic]) -> Traffic:
    """A run in which others left the processors alone; of a few, the least disturbed. Each run asks something new."""
    found: list[tuple[float, Traffic]] = []
    while len(found) < TRIES:
        began_s = processors_s()[1]
        done = traffic()
        others = (processors_s()[1] - began_s - done.cpu_s - TICK_S) / (done.wall_s * psutil.cpu_count())
        found.append((others, done))
        if others <= MOST_OTHERS:
            break
    return min(found, key=lambda entry: entry[0])[1]


def _wave(session: Session, prompts: Sequence[list[int]], *, callers: int, answer: int) -> Traffic:
    """Each prompt once, so many at a time. Raises MeasurementError when one is not answered."""
    kind = RequestKind(name="wave", share=1, prompt=_same(len(prompts[0])), answer=_same(answer))
    workload = Workload(name="steps", kinds=(kind,), arrivals="closed", concurrency=callers, num_requests=len(prompts))
    todo = [Job(kind="wave", prepare=partial(session.prepare_text, one), sampling=exactly(answer)) for one in prompts]
    return run(session, workload, todo)


def _first_s(traffic: Traffic) -> tuple[float, ...]:
    failed = next((one.error for one in traffic.served if one.ttft_s is None), None)
    if failed is not None:
        raise MeasurementError(f"a request that was to be timed failed: {failed}")
    return tuple(one.ttft_s or 0.0 for one in traffic.served)


def _words(session: Session, tokens: int, seed: int) -> list[int]:
    known = words(session)
    drawn: list[int] = known[np.random.default_rng(seed).integers(len(known), size=tokens)].tolist()
    return drawn


def _same(tokens: int) -> Sizes:
    return Sizes(least=tokens, most=tokens)
