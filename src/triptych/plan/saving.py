"""What compression and serving save: core-seconds × GB for the same traffic, factor by factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from triptych.core.device import Figure
from triptych.core.spec import Fact
from triptych.core.traffic import Traffic
from triptych.core.workload import Workload
from triptych.errors import MeasurementError
from triptych.plan.points import complete

FACTORS: Mapping[str, str] = {
    "text-only": "the encoder is opened by the first picture, not at the start: nothing, where pictures come",
    "vision weights": "the vision part as the bundle has it, not in bf16",
    "projector weights": "the projector as the bundle has it, not in bf16",
    "decoder weights": "the decoder and the word table as the bundle has them, not in bf16",
    "visual tokens": "fewer visual tokens before the decoder, not all of them",
    "KV cache": "keys and values in the chosen type, not in bf16",
    "batching": "many answers at once, not one after another",
    "caches": "beginnings of prompts and encoded pictures are kept, not computed again",
}
"""In the order in which the waterfall takes them; each is switched off by giving what a plain pipeline does."""

DRAWS = 2_000  # of the bootstrap
ALIKE = 1.01  # of two percentiles of seconds, which are no worse within a hundredth


class Run(Fact, frozen=True, kw_only=True):
    """One process of its own that answered the whole traffic once. on: the factors that were switched on."""

    on: tuple[str, ...]
    cpu_s: float  # of the process and its children, from the first request to the last answer
    wall_s: float
    peak_bytes: int  # resident meanwhile, all processes together
    ttft_p95_s: float
    latency_p95_s: float  # of whole answers
    num_requests: int
    answer_tokens: int

    @property
    def cost(self) -> float:
        """Core-seconds × GB."""
        return self.cpu_s * self.peak_bytes / 1e9


class Cost(Fact, frozen=True, kw_only=True):
    """What one way of serving took: medians with their extremes over its runs."""

    on: tuple[str, ...]
    cost: Figure  # core-seconds × GB
    cpu_s: Figure
    wall_s: Figure
    peak_bytes: Figure
    ttft_p95_s: Figure
    latency_p95_s: Figure


class Effect(Fact, frozen=True, kw_only=True):
    """One factor. *_off: how much more it takes with this one alone switched off, 0.1 is a tenth more.

    step: what is left of the cost when it is switched on after those before it, 0.9 is a tenth less; all steps
    multiplied are the whole saving. Where factors meet, the order decides: the two figures bracket what is its own.
    """

    name: str
    cost_off: float
    cpu_off: float
    memory_off: float
    step: float


class Saving(Fact, frozen=True, kw_only=True):
    """Baseline against ours. saved, kept: shares; their extremes are the worst and best pair of runs, and 95 %."""

    name: str
    workload: Workload
    about: tuple[str, ...]  # what the baseline is, what ours is, what was left out, in words
    baseline: Cost
    ours: Cost
    saved: Figure
    effects: tuple[Effect, ...]
    num_questions: int = 0
    right: tuple[int, int] = (0, 0)  # answers of the baseline, of ours
    kept: Figure | None = None  # of the baseline's right answers; None: no questions were asked
    runs: tuple[Run, ...] = ()

    def complaints(self, *, least: float = 0.47, quality: float = 0.99) -> tuple[str, ...]:
        """What speaks against it, as sentences; none: it saves `least` at the same quality and no worse p95."""
        found = []
        if self.saved.value < least:
            found.append(f"saves {self.saved.value:.1%}, under {least:.0%}")
        if self.kept is None:
            found.append("no questions were asked: the quality is unknown")
        elif self.kept.value < quality:
            found.append(f"keeps {self.kept.value:.1%} of the right answers, under {quality:.0%}")
        for name, before, now in (
            ("to the first token", self.baseline.ttft_p95_s, self.ours.ttft_p95_s),
            ("to the whole answer", self.baseline.latency_p95_s, self.ours.latency_p95_s),
        ):
            if now.value > ALIKE * before.value:
                found.append(f"p95 {name} is {now.value:.3g} s, the baseline's {before.value:.3g} s")
        return tuple(found)


def run_of(on: Sequence[str], traffic: Traffic) -> Run:
    """Raises MeasurementError where requests failed."""
    answered = complete(traffic).served
    first = [one.ttft_s for one in answered if one.ttft_s is not None]
    return Run(
        on=tuple(on),
        cpu_s=traffic.cpu_s,
        wall_s=traffic.wall_s,
        peak_bytes=traffic.peak_bytes,
        ttft_p95_s=float(np.percentile(first, 95)),
        latency_p95_s=float(np.percentile([one.latency_s for one in answered], 95)),
        num_requests=len(traffic.served),
        answer_tokens=sum(one.answer_tokens for one in answered),
    )


def plan_runs(factors: Sequence[str]) -> list[tuple[str, ...]]:
    """The ways to measure, ends first: all off, all on; each off alone; then switched on one after another."""
    every = tuple(factors)
    ways = [(), every, *(_without(every, name) for name in every)]
    ways += [every[:count] for count in range(1, len(every))]
    return list(dict.fromkeys(ways))


def saving_of(runs: Sequence[Run], factors: Sequence[str]) -> tuple[Cost, Cost, Figure, tuple[Effect, ...]]:
    """Baseline, ours, the share saved, and each factor's effect. Raises MeasurementError where runs do not compare."""
    _check(runs, factors)
    costs = {way: _cost(way, [run for run in runs if run.on == way]) for way in plan_runs(factors)}
    every = tuple(factors)
    plain, ours = costs[()], costs[every]
    effects = []
    for place, name in enumerate(every):
        off, before, after = costs[_without(every, name)], costs[every[:place]], costs[every[: place + 1]]
        effects.append(
            Effect(
                name=name,
                cost_off=off.cost.value / ours.cost.value - 1,
                cpu_off=off.cpu_s.value / ours.cpu_s.value - 1,
                memory_off=off.peak_bytes.value / ours.peak_bytes.value - 1,
                step=after.cost.value / before.cost.value,
            )
        )
    saved = Figure(
        value=1 - ours.cost.value / plain.cost.value,
        lowest=1 - ours.cost.highest / plain.cost.lowest,
        highest=1 - ours.cost.lowest / plain.cost.highest,
        num_samples=ours.cost.num_samples,
    )
    return plain, ours, saved, tuple(effects)


def kept_of(before: Sequence[bool], now: Sequence[bool], *, seed: int = 0) -> Figure:
    """Ours' right answers over the baseline's, with a 95 % interval from a bootstrap over the same questions."""
    if len(before) != len(now) or not any(before):
        raise MeasurementError(
            f"{sum(before)} of {len(before)} answers of the baseline are right, {len(now)} of ours were judged",
            hint="ask questions that the model can answer",
        )
    pairs = np.array([before, now], dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(before), (DRAWS, len(before)))
    sums = pairs[:, draws].sum(axis=2)
    low, high = np.percentile(sums[1] / np.maximum(sums[0], 1), (2.5, 97.5))
    return Figure(value=sum(now) / sum(before), lowest=float(low), highest=float(high), num_samples=len(before))


def _cost(way: tuple[str, ...], runs: Sequence[Run]) -> Cost:
    names = ("cost", "cpu_s", "wall_s", "peak_bytes", "ttft_p95_s", "latency_p95_s")
    return Cost(on=way, **{name: Figure.of([float(getattr(run, name)) for run in runs]) for name in names})


def _check(runs: Sequence[Run], factors: Sequence[str]) -> None:
    missing = [way for way in plan_runs(factors) if not any(run.on == way for run in runs)]
    if missing:
        raise MeasurementError(f"{len(missing)} ways were not measured, the first: {' + '.join(missing[0]) or 'plain'}")
    work = {(run.num_requests, run.answer_tokens) for run in runs}
    if len(work) > 1:
        raise MeasurementError(
            f"the runs answered different traffic: requests and tokens were {sorted(work)}",
            hint="use one workload with one seed for all",
        )


def _without(every: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(one for one in every if one != name)
