"""Measure throughput and latency by callers at once; run a batch that was chosen."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from triptych.core.progress import Progress, silent
from triptych.core.workload import Workload
from triptych.errors import ConfigError
from triptych.plan.batch import METRICS, REPEATS, BatchCurve, Found
from triptych.plan.points import SCATTER, Point, point, scatter
from triptych.session.jobs import jobs
from triptych.session.session import Session
from triptych.session.traffic import run, warm_up

CONFIRM_SEED = 104_729  # other words than the curve's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a curve is measured at. rounds: requests of each caller in a run, `least` of all callers together."""

    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    repeats: int = REPEATS
    rounds: int = 5
    least: int = 12


def measure_curve(
    session: Session, workload: Workload, grid: Grid | None = None, progress: Progress = silent
) -> BatchCurve:
    """Repeats go over all concurrencies, up and down by turns, so that a machine that drifts is seen to scatter.

    Where repeats lie too far apart there are more of them, up to twice as many.
    Raises MeasurementError for runs that contradict themselves, ConfigError for what cannot be run.
    """
    grid = grid or Grid()
    most, seats = max(grid.concurrencies), session.plan.max_num_seqs
    if most > seats:
        raise ConfigError(
            f"{most} callers at once, the engine answers {seats}: the others would only wait",
            hint=f"open the model with --max-num-seqs {most}",
        )
    warm_up(session, closed(workload, most, grid))
    runs: dict[int, list[Point]] = {size: [] for size in sorted(set(grid.concurrencies))}
    for repeat in range(2 * grid.repeats):
        for size in list(runs)[:: -1 if repeat % 2 else 1]:
            if repeat >= grid.repeats and scatter(runs[size]) <= SCATTER:
                continue
            done = sum(map(len, runs.values()))
            progress(f"{size} callers", min(done / (grid.repeats * len(runs)), 1.0))
            runs[size].append(measure(session, closed(workload, size, grid, workload.seed + 1 + done)))
    points = [found for size in runs for found in runs[size]]
    return BatchCurve(tuple(points), seed=workload.seed)


def confirm(session: Session, workload: Workload, found: Found, grid: Grid | None = None) -> Found:
    """One run at the batch found, of other requests than the curve's: its predictions with what was measured."""
    seed = workload.seed + CONFIRM_SEED
    ran = measure(session, closed(workload, found.batch, grid or Grid(), seed))
    measured = tuple(msgspec.structs.replace(one, measured=METRICS[one.name](ran) or None) for one in found.predictions)
    return msgspec.structs.replace(found, predictions=measured)


def measure(session: Session, workload: Workload) -> Point:
    """One run, not warmed up."""
    return point(run(session, workload, jobs(session, workload)))


def closed(workload: Workload, callers: int, grid: Grid, seed: int | None = None) -> Workload:
    """The workload's requests, asked by so many callers."""
    return msgspec.structs.replace(
        workload,
        arrivals="closed",
        concurrency=callers,
        num_requests=max(grid.rounds * callers, grid.least),
        seed=workload.seed if seed is None else seed,
    )
