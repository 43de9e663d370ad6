"""The simulation of one replica against this machine: the same open traffic, run and simulated, from light to too much.

usage: python bench/simulated.py [BUNDLE|demo] [--json bench/results/simulated.json] [--requests 60]

Steps are measured before, between and after the runs, by other requests than the traffic's: the machine is faster in
one minute than in the next, and a fit sees them all. Rates are shares of what the simulation by the first steps says
one replica can take; the last is more than that, and both must call it saturated.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import record
from rich.console import Console
from rich.table import Table

from triptych.core.device import StepCost
from triptych.core.traffic import Traffic
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.engine.config import EngineConfig
from triptych.plan.choose import Shown
from triptych.plan.costs import Fitted, fit_costs
from triptych.plan.points import saturation, spread
from triptych.plan.simulate import Fleet, Simulated, arrivals, simulate
from triptych.plan.timeline import Ask, Rules, from_costs, remembered
from triptych.session import Session
from triptych.session.jobs import jobs
from triptych.session.steps import Steps
from triptych.session.traffic import run, serve, warm_up

TEXT = RequestKind(name="text", share=1, prompt=Sizes(least=32, most=256), answer=Sizes(least=16, most=96))
PICTURE = RequestKind(
    name="picture", share=1, prompt=Sizes(least=48, most=64), answer=Sizes(least=8, most=48), images=1
)
WORKLOADS = (Workload(name="text", kinds=(TEXT,)), Workload(name="mixed", kinds=(TEXT, PICTURE)))
SHARES = (0.4, 0.7, 1.6)
BATCH = 16
FIRST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    share: float
    rate: float
    ran: Traffic
    said: Simulated

    @property
    def seen(self) -> str | None:
        """Why it was saturated, in words."""
        return saturation(self.ran.served)

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """Figure, simulated, measured."""
        served = self.ran.answered
        ttft, tpot = spread([one.ttft_s for one in served]), spread([one.tpot_s for one in served])
        mean_s = float(np.mean([one.latency_s for one in served]))
        return [
            ("TTFT p50", self.said.ttft.p50, ttft.p50),
            ("TTFT p95", self.said.ttft.p95, ttft.p95),
            ("TPOT p50", self.said.tpot.p50, tpot.p50),
            ("latency, mean", self.said.mean_latency_s, mean_s),
            ("latency p95", self.said.latency.p95, spread([one.latency_s for one in served]).p95),
        ]


def shown_by(session: Session) -> Shown:
    """Visual tokens and tiles of a request, asked of the model."""
    workload = Workload(name="one", kinds=(PICTURE,), arrivals="closed", concurrency=1, num_requests=1)
    (one,) = run(session, workload, jobs(session, workload)).served
    return lambda kind: (kind.images * one.image_tokens, kind.images * one.tiles)


def capacity(workload: Workload, fleet: Fleet, shown: Shown) -> float:
    """Requests a second at which the simulation begins to be saturated."""
    low, high = 0.1, 200.0
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        asked = msgspec.structs.replace(workload, rate_per_s=middle, num_requests=1500)
        low, high = (low, middle) if simulate(arrivals(asked, shown), fleet).saturated else (middle, high)
    return low


def again(ran: Traffic) -> list[Ask]:
    """What was run, to be simulated."""
    return [
        Ask(prompt_tokens=one.prompt_tokens, answer_tokens=one.answer_tokens, tiles=one.tiles, at_s=one.asked_s)
        for one in ran.answered
    ]


def fitted(session: Session, steps: Steps) -> StepCost:
    seen = steps.seen()
    of = Fitted(device="here", weights_digest=session.manifest.weights_digest, settings="default")
    return fit_costs(seen.steps, seen.tiles, of)


def replica(cost: StepCost) -> Fleet:
    known = from_costs(cost)
    costs = replace(known, step_s=remembered(known.step_s))  # as plans have them
    return Fleet(replicas=1, costs=costs, rules=Rules(max_sequences=BATCH))


def compare(session: Session, requests: int, console: Console) -> tuple[list[Case], StepCost]:
    """All that was run, and what the steps of all minutes say of it."""
    steps = Steps(session)
    for _ in range(FIRST_ROUNDS):
        _measure(steps)
    first, shown = replica(fitted(session, steps)), shown_by(session)
    done: list[tuple[Workload, float, float, Traffic]] = []
    for workload in WORKLOADS:
        most = capacity(workload, first, shown)
        for turn, share in enumerate(SHARES):
            rate = share * most
            count = requests if share < 1 else 3 * requests  # seats fill up before a queue is seen to grow
            asked = msgspec.structs.replace(workload, rate_per_s=rate, num_requests=count, seed=10 + turn)
            ran = serve(session, asked) if not turn else run(session, asked, jobs(session, asked))
            done.append((workload, share, rate, ran))
            console.print(f"{workload.name} at {rate:.2f}/s: {ran.wall_s:.0f} s")
            _measure(steps)
    fleet = replica(cost := fitted(session, steps))
    return [
        Case(name=workload.name, share=share, rate=rate, ran=ran, said=simulate(again(ran), fleet))
        for workload, share, rate, ran in done
    ], cost


def _measure(steps: Steps) -> None:
    for _ in steps.measure():
        pass


def show(cases: list[Case], console: Console) -> None:
    table = Table(title="one replica, simulated and run")
    for column in ("traffic", "rate", "figure", "simulated", "measured", "error", "saturated: said, seen"):
        table.add_column(column, justify="left" if column in ("traffic", "figure") else "right")
    for case in cases:
        for index, (name, said, measured) in enumerate(case.rows):
            first = (case.name, f"{case.rate:.2f}/s = {case.share:.0%}") if not index else ("", "")
            word = f"{bool(case.said.saturated)}, {bool(case.seen)}" if not index else ""
            table.add_row(
                *first, name, f"{said * 1e3:,.1f} ms", f"{measured * 1e3:,.1f} ms", f"{said / measured - 1:+.0%}", word
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", default="demo")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=60)
    asked, console = parser.parse_args(), Console()
    with Session.open(asked.bundle, config=EngineConfig(max_num_seqs=BATCH)) as session:
        warm_up(session, msgspec.structs.replace(WORKLOADS[1], arrivals="closed", concurrency=BATCH))
        cases, cost = compare(session, asked.requests, console)
    console.print(f"steps fitted, nine of ten within {cost.error:.1%}")
    show(cases, console)
    steady = [case for case in cases if case.share < 1]
    errors: dict[str, list[float]] = {name: [] for name, *_ in cases[0].rows}
    for case in steady:
        for name, said, measured in case.rows:
            errors[name].append(abs(said / measured - 1))
    found = [record.measure(f"simulation error, {name}", "steady", "share", errors[name]) for name in errors]
    told = [bool(case.said.saturated) == bool(case.seen) for case in cases]
    shares = (("TPOT", "TPOT p50", 0.1), ("the mean latency", "latency, mean", 0.1), ("TTFT", "TTFT p50", 0.2))
    aims = [record.Target(name="saturation told as seen", value=sum(told) / len(told), unit="share", at_least=1.0)]
    for name, figure, most in shares:
        value = float(np.median(errors[figure]))
        aims.append(record.Target(name=f"median error of {name}", value=value, unit="share", at_most=most))
    for aim in aims:
        console.print(f"{aim.name}: {aim.value:.3g} ({'met' if aim.is_met else 'MISSED'})")
    if asked.json:
        rows = [
            {"traffic": case.name, "rate_per_s": case.rate, "figure": name, "simulated": said, "measured": measured}
            for case in cases
            for name, said, measured in case.rows
        ]
        saturated = [
            {"traffic": case.name, "rate_per_s": case.rate, "said": case.said.saturated, "seen": case.seen}
            for case in cases
        ]
        settings = {"bundle": asked.bundle, "requests": asked.requests, "fit_error": cost.error, "rows": rows,
                    "saturated": saturated}  # fmt: skip
        record.write(asked.json, record.record("simulated", found, aims, settings))


if __name__ == "__main__":
    main()
