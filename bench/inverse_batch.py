"""Does the batch that the inverse search names reach its target? Twenty targets, each run; some impossible.

usage: python bench/inverse_batch.py [BUNDLE|demo] [--json bench/results/inverse_batch.json] [--quick]

A curve is measured at rising numbers of callers, three times each. Targets are spread over what it holds, rates and
latencies; each batch found is run once, with other requests than the curve's, in random order. A target is reached
where that one run keeps it. Beyond the curve lie targets that must be refused.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import record
from rich.console import Console
from rich.table import Table

from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.errors import ConfigError
from triptych.plan.batch import RATES, BatchCurve, Bound, Found, inverse_batch_search
from triptych.session import Session
from triptych.session.curves import Grid, confirm, measure_curve

TEXT = RequestKind(name="text", share=1, prompt=Sizes(least=32, most=64), answer=Sizes(least=24, most=40))
WORKLOAD = Workload(name="text", kinds=(TEXT,), arrivals="closed", concurrency=1)
GRID = Grid(concurrencies=(1, 2, 4, 8, 12, 16))
QUICK = Grid(concurrencies=(1, 2, 4), rounds=4, least=8)


@dataclass(frozen=True, kw_only=True)
class Try:
    bounds: tuple[Bound, ...]
    found: Found | None  # None: refused
    reason: str

    @property
    def is_reached(self) -> bool:
        return self.found is not None and all(_keeps(bound, self.measured(bound)) for bound in self.bounds)

    @property
    def is_held(self) -> bool:
        """Whether what was measured lies in the interval that was said."""
        said = [] if self.found is None else [self.found[bound.metric] for bound in self.bounds]
        return all(one.lowest <= (one.measured or 0.0) <= one.highest for one in said)

    def measured(self, bound: Bound) -> float:
        return (self.found[bound.metric].measured or 0.0) if self.found is not None else 0.0


def _keeps(bound: Bound, measured: float) -> bool:
    return measured >= bound.value if bound.metric in RATES else measured <= bound.value


def targets(curve: BatchCurve) -> list[tuple[Bound, ...]]:
    """Fourteen rates and six latencies, evenly spread over what the curve surely holds."""

    def edges(metric: str) -> tuple[float, float]:
        rising = curve.batches <= curve.peak
        edge = np.quantile(curve.runs_drawn(metric), 0.1 if metric in RATES else 0.9, axis=0)[rising]
        return float(edge[0]), float(edge.max())

    spread = (("tokens_per_s", 10), ("requests_per_s", 4), ("tpot_p95", 4), ("latency_p95", 2))
    asked: list[tuple[Bound, ...]] = []
    for metric, count in spread:
        low, high = edges(metric)
        asked += [(Bound(metric=metric, value=float(value)),) for value in np.linspace(low, high, count + 2)[1:-1]]
    return asked


def impossible(curve: BatchCurve) -> list[tuple[Bound, ...]]:
    best, first = float(curve.at("tokens_per_s").max()), float(curve.at("tpot_p95")[0])
    return [
        (Bound(metric="tokens_per_s", value=1.5 * best),),
        (Bound(metric="tokens_per_s", value=20 * best),),
        (Bound(metric="tpot_p95", value=0.4 * first),),
        (Bound(metric="ttft_p50", value=1e-5),),
        (Bound(metric="tokens_per_s", value=0.9 * best), Bound(metric="tpot_p95", value=first)),
    ]


def search(curve: BatchCurve, bounds: tuple[Bound, ...]) -> Try:
    try:
        return Try(bounds=bounds, found=inverse_batch_search(curve, bounds), reason="")
    except ConfigError as error:
        return Try(bounds=bounds, found=None, reason=error.message)


def run(session: Session, grid: Grid, console: Console) -> tuple[BatchCurve, list[Try], list[Try]]:
    curve = measure_curve(session, WORKLOAD, grid, lambda what, share: console.print(f"{share:4.0%} {what}"))
    tries = [search(curve, bounds) for bounds in targets(curve)]
    order = list(range(len(tries)))
    random.Random(0).shuffle(order)
    for turn, index in enumerate(order):
        one = tries[index]
        if one.found is not None:
            other = msgspec.structs.replace(WORKLOAD, seed=1000 + turn)
            tries[index] = Try(bounds=one.bounds, found=confirm(session, other, one.found, grid), reason="")
    return curve, tries, [search(curve, bounds) for bounds in impossible(curve)]


def show(curve: BatchCurve, tries: list[Try], refused: list[Try], console: Console) -> None:
    table = Table(title=f"{len(tries)} targets; the curve's peak is at {curve.peak}")
    for column in ("target", "batch", "likely", "predicted", "interval", "measured", "reached", "held"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for one in tries:
        (bound,) = one.bounds
        name = f"{bound.metric} {'≥' if bound.metric in RATES else '≤'} {bound.value:.4g}"
        if one.found is None:
            table.add_row(name, "–", "", "", "", "", "refused", one.reason)
            continue
        said = one.found[bound.metric]
        likely = f"{one.found.least}–{one.found.most}"
        interval = f"{said.lowest:.4g}–{said.highest:.4g}"
        verdict = ("yes" if one.is_reached else "NO", "yes" if one.is_held else "no")
        table.add_row(
            name, str(one.found.batch), likely, f"{said.value:.4g}", interval, f"{said.measured:.4g}", *verdict
        )
    console.print(table)
    for one in refused:
        asked = " and ".join(f"{bound.metric} {bound.value:.4g}" for bound in one.bounds)
        console.print(f"{asked}: {'NOT refused' if one.found is not None else 'refused: ' + one.reason}")
    console.print(f"scalability law: {curve.usl}")


def measures(curve: BatchCurve, tries: list[Try]) -> list[record.Measure]:
    found = [
        record.measure(name, f"{size} callers", unit, [value(point) for point in points])
        for size, points in curve.runs.items()
        for name, unit, value in (
            ("throughput", "tokens/s", lambda point: point.tokens_per_s),
            ("time per output token, p95", "s", lambda point: point.tpot.p95),
            ("time to first token, p95", "s", lambda point: point.ttft.p95),
        )
    ]
    errors = [abs(one.found[one.bounds[0].metric].error or 0.0) for one in tries if one.found is not None]
    found.append(record.measure("prediction error at the batch found", "all targets", "share", errors))
    found.append(record.measure("distance of the scalability law", "curve", "share", [curve.usl.error]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", default="demo")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    asked, console, began = parser.parse_args(), Console(), time.perf_counter()
    with Session.open(asked.bundle) as session:
        curve, tries, refused = run(session, QUICK if asked.quick else GRID, console)
        choices = session.plan.choices
    show(curve, tries, refused, console)
    shares = (
        ("targets reached by the one run at the batch found", [one.is_reached for one in tries], 0.9),
        ("runs within the interval that was said", [one.is_held for one in tries], 0.8),
        ("impossible targets refused", [one.found is None for one in refused], 1.0),
    )
    aims = [
        record.Target(name=name, value=sum(of) / len(of), unit="share", at_least=least) for name, of, least in shares
    ]
    for aim in aims:
        console.print(f"{aim.name}: {aim.value:.0%} ({'met' if aim.is_met else 'MISSED'})")
    console.print(f"{time.perf_counter() - began:.0f} s")
    if asked.json:
        rows = [
            {
                "asked": [msgspec.to_builtins(bound) for bound in one.bounds],
                "batch": one.found and one.found.batch,
                "likely": one.found and [one.found.least, one.found.most],
                "predicted": one.found and [msgspec.to_builtins(one.found[bound.metric]) for bound in one.bounds],
                "refused": one.reason or None,
            }
            for one in (*tries, *refused)
        ]
        settings = {"bundle": asked.bundle, "workload": msgspec.to_builtins(WORKLOAD), "choices": choices, "rows": rows}
        record.write(asked.json, record.record("inverse_batch", measures(curve, tries), aims, settings))


if __name__ == "__main__":
    main()
