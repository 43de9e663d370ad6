"""Real steps of an open session, measured in rounds: answers by number and context, prompts, pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import msgspec
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

CONTEXTS = ((34, (1, 2, 4, 8, 16, 24, 32)), (258, (1, 4, 12)), (1026, (1, 3)))  # tokens, and how many at once
PROMPTS = (8, 32, 64, 128, 256, 512)  # tokens; a context is blocks of 32 and 2 more: what is cached of it is all but 2
ANSWER = 17  # tokens of an answer, from the first to the last of which time is taken
BEFORE = 4  # steps of an answer before the next prompt
ROUNDS = 4
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
    """Run real requests, a minute of them for a small model. Raises MeasurementError.

    Nothing else should run meanwhile.
    """
    steps = Steps(session)
    for index in range(ROUNDS):
        for _ in steps.measure():
            progress("steps", index / ROUNDS)
    progress("steps", 1.0)
    return steps.seen()


class Steps:
    """Rounds of steps of every kind: the machine is slower in one minute than in the next, and all kinds see both."""

    def __init__(self, session: Session) -> None:
        """Compile every shape, in a round that does not count."""
        self._session = session
        self._seeds = itertools.count(WORDS + (1 << 16))
        self._seconds: dict[SeenStep, list[float]] = {kind: [] for kind in _kinds(session)}
        self._tiles_s: dict[int, list[float]] = {}
        for _ in self.measure():
            pass
        for samples in (*self._seconds.values(), *self._tiles_s.values()):
            samples.clear()

    def measure(self) -> Iterator[None]:
        """One round; between its steps others may be timed. Raises MeasurementError for what is not answered."""
        for kind, samples in self._seconds.items():
            samples.append(self._answers_s(kind) if kind.answers else self._prompt_s(kind.prompt + kind.earlier))
            yield
        for side in SIDES if self._session.manifest.spec.vision is not None else ():
            self._picture(side)
            yield

    def seen(self) -> Seen:
        """Of all rounds, a step's samples in their order. Raises MeasurementError."""
        steps = tuple(
            msgspec.structs.replace(kind, seconds=self._later_s(kind, samples) if kind.earlier else tuple(samples))
            for kind, samples in self._seconds.items()
        )
        if free := [tiles for tiles, each in self._tiles_s.items() if median(each) <= 0]:
            raise MeasurementError(f"prompts with a picture of {free[0]} tiles took no longer than without", hint=QUIET)
        tiles = tuple(
            CostPoint(size=tiles, seconds=median(each), lowest_s=max(0.0, min(each)), highest_s=max(each))
            for tiles, each in sorted({0: [0.0], **self._tiles_s}.items())
        )
        return Seen(steps=steps, tiles=tiles if self._tiles_s else ())

    def _later_s(self, kind: SeenStep, whole_s: list[float]) -> tuple[float, ...]:
        """Of a long prompt's second step: it sees more than the first, so less is a mistake."""
        first_s = self._seconds[SeenStep(prompt=kind.prompt, seconds=())]
        if median(whole_s) <= 1.5 * median(first_s):
            took = f"{median(whole_s):.3g} s, one of {kind.prompt:,} {median(first_s):.3g} s"
            raise MeasurementError(f"a prompt of {kind.prompt + kind.earlier:,} tokens took {took}", hint=QUIET)
        return tuple(max(whole - first, first / 2) for whole, first in zip(whole_s, first_s, strict=True))

    def _prompt_s(self, tokens: int) -> float:
        """One that shares nothing with others, after steps of answers, as in traffic.

        OpenVINO takes up to twice as long for a shape that it did not just see.
        """
        seeds = self._seeds
        alone = undisturbed(lambda: _wave(self._session, [_words(self._session, tokens, next(seeds))], answer=BEFORE))
        return alone.served[0].ttft_s or 0.0

    def _answers_s(self, kind: SeenStep) -> float:
        """So many at once."""
        tokens = kind.cached // kind.answers - ANSWER // 2
        prompts = [_words(self._session, tokens, WORDS + seed) for seed in range(kind.answers)]
        run(self._session, _closed(kind.answers), _asked(self._session, prompts, 1))  # their prompts are cached then
        traffic = undisturbed(partial(_wave, self._session, prompts, answer=ANSWER))
        return median(one.tpot_s or 0.0 for one in traffic.served)

    def _picture(self, side: tuple[int, int]) -> None:
        """What a picture adds to the time of a prompt of as many words: preparing and encoding it."""
        prompt, answer = Sizes.exactly(64), Sizes.exactly(1)
        kind = RequestKind(name="picture", share=1, prompt=prompt, answer=answer, images=1, image_side=side)

        def alone() -> Traffic:
            workload = msgspec.structs.replace(_closed(1), kinds=(kind,), seed=next(self._seeds))
            return run(self._session, workload, jobs(self._session, workload))

        (one,) = _answered(undisturbed(alone)).served
        words_s = self._prompt_s(min(one.prompt_tokens, self._session.plan.max_model_len - BEFORE))
        self._tiles_s.setdefault(one.tiles, []).append((one.ttft_s or 0.0) - words_s)


def _kinds(session: Session) -> Iterator[SeenStep]:
    """What there is room for."""
    room_of_all, step = session.plan.num_blocks * BLOCK_TOKENS, session.plan.max_num_batched_tokens
    room = min(session.plan.max_model_len, room_of_all)
    for tokens in PROMPTS:
        if tokens < room:
            yield SeenStep(prompt=tokens, seconds=())
    if step in PROMPTS and 2 * step <= room:
        yield SeenStep(prompt=step, earlier=step, seconds=())
    for tokens, counts in CONTEXTS:
        for n in counts:
            if n <= session.plan.max_num_seqs and tokens + ANSWER <= room and n * (tokens + ANSWER) <= room_of_all:
                yield SeenStep(answers=n, cached=n * (tokens + ANSWER // 2), seconds=())


def _closed(callers: int) -> Workload:
    kind = RequestKind(name="wave", share=1, prompt=Sizes.exactly(1), answer=Sizes.exactly(1))
    return Workload(name="steps", kinds=(kind,), arrivals="closed", concurrency=callers, num_requests=callers)


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


def _wave(session: Session, prompts: Sequence[list[int]], *, answer: int) -> Traffic:
    return _answered(run(session, _closed(len(prompts)), _asked(session, prompts, answer)))


def _asked(session: Session, prompts: Sequence[list[int]], answer: int) -> list[Job]:
    sampling = exactly(answer)
    return [Job(kind="wave", prepare=partial(session.prepare_text, one), sampling=sampling) for one in prompts]


def _answered(traffic: Traffic) -> Traffic:
    failed = next((one.error for one in traffic.served if one.first_s is None), None)
    if failed is not None:
        raise MeasurementError(f"a request that was to be timed failed: {failed}")
    return traffic


def _words(session: Session, tokens: int, seed: int) -> list[int]:
    known = words(session)
    drawn: list[int] = known[np.random.default_rng(seed).integers(len(known), size=tokens)].tolist()
    return drawn
