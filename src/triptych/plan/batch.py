"""Callers to throughput and latency, measured; and back: the batch for a rate or a bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from triptych.core.plan import Prediction
from triptych.core.spec import Fact
from triptych.errors import ConfigError, MeasurementError
from triptych.plan.extra import extra
from triptych.plan.monotone import isotonic, through
from triptych.plan.points import Point, check_little, check_scatter

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
REPEATS = 3  # of each concurrency, at least
DRAWS = 400  # of the bootstrap
LOW, HIGH = 0.05, 0.95  # nine of ten runs lie between
SURE = 0.9  # of runs, that keep what is asked

RATES = ("tokens_per_s", "requests_per_s")
TIMES = tuple(f"{name}_{rank}" for name in ("ttft", "tpot", "latency") for rank in ("p50", "p95", "p99"))
METRICS: dict[str, Callable[[Point], float]] = {
    name: attrgetter(name if name in RATES else name.replace("_", ".")) for name in (*RATES, *TIMES)
}


class Bound(Fact, frozen=True, kw_only=True):
    """What is asked of one figure: a rate at least, or seconds at most."""

    metric: str  # of METRICS
    value: float


class Found(Fact, frozen=True, kw_only=True):
    """A batch, and what one run at it should measure. least to most: where nine of ten bootstrapped curves put it."""

    batch: int
    least: int
    most: int
    bounds: tuple[Bound, ...]
    predictions: tuple[Prediction, ...]  # one for each of METRICS
    reason: str

    def __getitem__(self, metric: str) -> Prediction:
        return next(one for one in self.predictions if one.name == metric)


class Usl(Fact, frozen=True, kw_only=True):
    """Gunther's universal scalability law, X = λN / (1 + σ(N-1) + κN(N-1)); a cross-check, nothing is read from it."""

    rate: float  # λ
    contention: float  # σ
    coherency: float  # κ
    error: float  # median of |law / curve - 1| at the measured concurrencies


@dataclass(frozen=True)
class BatchCurve:
    """Runs at rising concurrencies, each repeated. Raises MeasurementError for what contradicts itself."""

    points: tuple[Point, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.runs) < 3:
            raise MeasurementError(f"{len(self.runs)} concurrencies were measured, a curve needs 3")
        for batch, runs in self.runs.items():
            if len(runs) < REPEATS:
                raise MeasurementError(f"{batch} callers were measured {len(runs)} times, {REPEATS} are needed")
            check_scatter(runs)
            for run in runs:
                check_little(run)

    @cached_property
    def runs(self) -> dict[int, list[Point]]:
        ordered = sorted(self.points, key=lambda found: found.concurrency)
        return {batch: list(runs) for batch, runs in itertools.groupby(ordered, lambda found: found.concurrency)}

    @cached_property
    def batches(self) -> NDArray[np.int64]:
        """All that may be asked for: each whole number from the least measured concurrency to the greatest."""
        sizes = list(self.runs)
        return np.arange(sizes[0], sizes[-1] + 1)

    def at(self, metric: str) -> Floats:
        """(num_batches,): the curve at each of `batches`."""
        return self._fit(metric, self._medians(metric))

    def curves(self, metric: str) -> Floats:
        """(DRAWS, num_batches): curves of runs drawn anew; what two of them differ by is not known better."""
        return self._drawn[metric][0]

    def runs_drawn(self, metric: str) -> Floats:
        """(DRAWS, num_batches): what one more run at each batch may measure."""
        return self._drawn[metric][1]

    @cached_property
    def peak(self) -> int:
        """The measured concurrency of the greatest throughput; beyond it the curve falls."""
        rates = self._medians("tokens_per_s")
        errors = [float(((_unimodal(rates, top) - rates) ** 2).sum()) for top in range(len(rates))]
        return list(self.runs)[int(np.argmin(errors))]

    @cached_property
    def usl(self) -> Usl:
        sizes, rates = np.array(list(self.runs), float), self._medians("tokens_per_s")

        def off(law: Floats) -> Floats:
            rate, contention, coherency = law
            found: Floats = rate * sizes / (1 + contention * (sizes - 1) + coherency * sizes * (sizes - 1)) / rates - 1
            return found

        first, limits = (rates[0] / sizes[0], 0.1, 0.001), ((0.0, 0.0, 0.0), (np.inf, 1.0, 1.0))
        fitted = extra("scipy.optimize").least_squares(off, first, bounds=limits).x
        error = float(np.median(np.abs(off(fitted))))
        return Usl(rate=float(fitted[0]), contention=float(fitted[1]), coherency=float(fitted[2]), error=error)

    # ── fitting and drawing ────────────────────────────────────────────────────────────────────────────────────

    def _medians(self, metric: str) -> Floats:
        read = METRICS[metric]
        return np.array([np.median([read(run) for run in runs]) for runs in self.runs.values()])

    def _fit(self, metric: str, medians: Floats) -> Floats:
        """medians: (…, num_sizes) → (…, num_batches)."""
        sizes = list(self.runs)
        smooth = _unimodal(medians, sizes.index(self.peak)) if metric in RATES else isotonic(medians)
        return through(sizes, smooth)(self.batches)

    @cached_property
    def _drawn(self) -> dict[str, tuple[Floats, Floats]]:
        """A residual bootstrap: how far runs lie from their median is pooled over all concurrencies.

        Few repeats hide how far the next may lie: residuals are widened by √(n / (n - 1)). One draw moves all
        metrics of a run together, so that a slow run is slow in each.
        """
        rng = np.random.default_rng(self.seed)
        repeats = [len(runs) for runs in self.runs.values()]
        picks = [rng.integers(len(self.points), size=(DRAWS, count)) for count in repeats]
        once = rng.integers(len(self.points), size=(DRAWS, len(self.batches)))
        drawn: dict[str, tuple[Floats, Floats]] = {}
        for metric in METRICS:
            medians, rest = self._medians(metric), self._residuals(metric)
            moved = np.stack([np.median(rest[pick], axis=1) for pick in picks], axis=1)  # (DRAWS, num_sizes)
            curves = self._fit(metric, medians * np.exp(moved))
            drawn[metric] = curves, curves * np.exp(rest[once])
        return drawn

    def _residuals(self, metric: str) -> Floats:
        """(num_points,): log of each run over its concurrency's median; 0 where that is not known."""
        read, rest = METRICS[metric], []
        for runs in self.runs.values():
            values = np.array([read(run) for run in runs])
            middle = np.median(values)
            wide = np.sqrt(len(runs) / (len(runs) - 1))
            rest += list(wide * np.log(values / middle)) if middle > 0 and values.min() > 0 else [0.0] * len(runs)
        return np.array(rest)


def _unimodal(values: Floats, top: int) -> Floats:
    """Rising up to index `top`, falling from there; along the last axis."""
    rising = isotonic(values[..., : top + 1])
    falling = isotonic(np.concatenate([rising[..., -1:], values[..., top + 1 :]], axis=-1), rises=False)
    return np.concatenate([rising[..., :-1], falling], axis=-1)


# ── the search ───────────────────────────────────────────────────────────────────────────────────────────────────


def inverse_batch_search(curve: BatchCurve, bounds: Sequence[Bound]) -> Found:
    """The smallest batch that reaches every rate asked for, else the largest that keeps every latency.

    A batch counts where nine of ten runs at it would keep all that is asked at once. It lies on the rising side of the
    curve and between measured concurrencies. Raises ConfigError where there is none, with the nearest that can be had.
    """
    for bound in bounds:
        if bound.metric not in METRICS or bound.value <= 0:
            raise ConfigError(
                f"{bound.metric} of {bound.value:g} cannot be asked for", hint=f"known: {', '.join(METRICS)}"
            )
    rates = [bound for bound in bounds if bound.metric in RATES]
    rising = curve.batches <= curve.peak
    fast = rising & (_share(curve, rates) >= SURE)
    if not fast.any():
        raise _impossible(curve, rates, rising)
    kept = fast & (_share(curve, bounds) >= SURE)
    if not kept.any():
        raise _impossible(curve, bounds, fast)
    chosen = int(np.flatnonzero(kept)[0 if rates else -1])
    likely = _likely(curve, bounds, "first" if rates else "last")
    batch = int(curve.batches[chosen])
    return Found(
        batch=batch,
        least=int(min([*likely, batch])),
        most=int(max([*likely, batch])),
        bounds=tuple(bounds),
        predictions=tuple(_prediction(curve, metric, chosen) for metric in METRICS),
        reason=f"the {'smallest' if rates else 'largest'} batch at which nine of ten runs keep all that was asked",
    )


def _edge(curve: BatchCurve, metric: str) -> Floats:
    """(num_batches,): the figure that nine of ten runs better."""
    drawn = curve.runs_drawn(metric)
    if metric in RATES:
        return np.quantile(drawn, 1 - SURE, axis=0, method="higher")
    return np.quantile(drawn, SURE, axis=0, method="lower")


def _keep(bounds: Sequence[Bound], drawn: Callable[[str], Floats]) -> Bools:
    """(DRAWS, num_batches): which of the curves or runs drawn keep all bounds at once; a draw is of all metrics."""
    kept = np.ones_like(drawn(RATES[0]), bool)
    for bound in bounds:
        values = drawn(bound.metric)
        kept &= values >= bound.value if bound.metric in RATES else values <= bound.value
    return kept


def _share(curve: BatchCurve, bounds: Sequence[Bound]) -> Floats:
    """(num_batches,): of runs that keep all bounds."""
    return np.asarray(_keep(bounds, curve.runs_drawn).mean(axis=0))


def _likely(curve: BatchCurve, bounds: Sequence[Bound], which: Literal["first", "last"]) -> NDArray[np.int64]:
    """Where drawn curves put the batch, 5th and 95th percentile; empty where fewer than half put it anywhere."""
    keeps = _keep(bounds, curve.curves) & (curve.batches <= curve.peak)
    some = keeps[keeps.any(axis=1)]
    if 2 * len(some) < DRAWS:
        return np.empty(0, np.int64)
    at = some.argmax(axis=1) if which == "first" else some.shape[1] - 1 - some[:, ::-1].argmax(axis=1)
    found: NDArray[np.int64] = curve.batches[np.quantile(at, [LOW, HIGH], method="nearest").astype(int)]
    return found


def _prediction(curve: BatchCurve, metric: str, at: int) -> Prediction:
    lowest, highest = np.quantile(curve.runs_drawn(metric)[:, at], [LOW, HIGH])
    unit = {"tokens_per_s": "tokens/s", "requests_per_s": "requests/s"}.get(metric, "s")
    return Prediction(
        name=metric, unit=unit, value=float(curve.at(metric)[at]), lowest=float(lowest), highest=float(highest)
    )


def _impossible(curve: BatchCurve, bounds: Sequence[Bound], among: Bools) -> ConfigError:
    """Which bound fails, and what there is instead."""
    told: list[str] = []
    for bound in bounds:
        edge = np.where(among, _edge(curve, bound.metric), -np.inf if bound.metric in RATES else np.inf)
        best = int(edge.argmax() if bound.metric in RATES else edge.argmin())
        kept = edge[best] >= bound.value if bound.metric in RATES else edge[best] <= bound.value
        if not kept:
            likely = float(curve.at(bound.metric)[best])
            told.append(
                f"{bound.metric} of {bound.value:.4g}: batch {curve.batches[best]} comes nearest with {likely:.4g}, "
                f"of which nine of ten runs keep {edge[best]:.4g}"
            )
    share = np.where(among, _share(curve, bounds), -np.inf)
    nearest = f"batch {curve.batches[share.argmax()]} comes nearest, in {share.max():.0%} of runs"
    return ConfigError(
        "; ".join(told) or f"no batch keeps all that was asked at once in nine of ten runs: {nearest}",
        hint=f"measured from {curve.batches[0]} to {curve.batches[-1]} callers, the peak is at {curve.peak}; "
        "ask for less, use more replicas, or measure further",
    )
