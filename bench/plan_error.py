"""Are predictions right? 24 combinations of shape, precision, batch, prompt and pictures that no fit has seen.

usage: python bench/plan_error.py --machine machine.json --base BUNDLE [--development] [--json OUT] [--seconds 400]

Two kinds of prediction, reported apart. `same opening`: by the model's own StepCost, fitted to other batches and
prompts that are measured in rounds with the combinations between them, since the machine may take half as long again a
few seconds later. `other shapes`: by the machine's figures and the steps of two other shapes (`KNOWN`), opened apart;
a small model that is open beside all says how fast the machine was meanwhile. Measured is the median of all runs.
`--development` asks other shapes and combinations: rules may be tuned on those, never on the 24.
It resumes: what was measured lies beside the rivals' models; `--seconds` ends a visit before the next model.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import record
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from shapes import Shape, Tower, make

from triptych.core.bundle import Precision
from triptych.core.device import DeviceSpec
from triptych.core.traffic import Traffic
from triptych.core.workload import RequestKind, Sizes, Workload
from triptych.engine.config import EngineConfig
from triptych.errors import MeasurementError
from triptych.plan.costs import Fitted, fit_costs
from triptych.plan.efficiency import SeenModel, fit_efficiency
from triptych.plan.roofline import Roofline
from triptych.plan.timeline import Ask, Costs, Rules, from_costs, play
from triptych.plan.work import Held
from triptych.session import Session
from triptych.session.jobs import jobs
from triptych.session.steps import Seen, Steps, undisturbed
from triptych.session.traffic import run, warm_up

FOLDER = Path(__file__).parent / ".rivals" / "plan"
ANSWER = 33  # tokens
FIRST_SEED = 10_000_000  # far from those of `Steps`: a prompt that it has asked is in the prefix cache
ROUNDS, TIMES = 4, 3  # and how often each combination is run in each
OWN, OTHERS = "same opening", "other shapes"
NUM_THREADS = 2
SIDE = (448, 448)  # pixels of a picture
PRECISIONS: tuple[Precision, ...] = ("int8", "int4")
Entry = dict[str, Any]  # a model's samples, as they are kept
Mood = dict[str, float]  # seconds of `answers` and of `prompts`, or how much longer than usually these take

KNOWN = (
    Shape(name="known-a", hidden=576, layers=12, heads=9, kv_heads=3, intermediate=1536,
          tower=Tower(hidden=384, layers=6, heads=6, intermediate=1536)),
    Shape(name="known-b", hidden=1024, layers=16, heads=16, kv_heads=4, intermediate=2816,
          tower=Tower(hidden=768, layers=6, heads=12, intermediate=3072)),
)  # fmt: skip
UNSEEN = (
    Shape(name="deep", hidden=640, layers=20, heads=10, kv_heads=5, intermediate=1728,
          tower=Tower(hidden=512, layers=8, heads=8, intermediate=2048)),
    Shape(name="wide", hidden=1280, layers=8, heads=20, kv_heads=4, intermediate=3456),
    Shape(name="even", hidden=768, layers=14, heads=12, kv_heads=12, intermediate=2048),
    Shape(name="eyes", hidden=896, layers=12, heads=14, kv_heads=2, intermediate=2432,
          tower=Tower(hidden=576, layers=10, heads=9, intermediate=2304)),
)  # fmt: skip
# batch, prompt, images; three of each model
ASKED = {
    "deep int8": ((1, 100, 0), (6, 72, 0), (1, 96, 1)),
    "deep int4": ((3, 200, 0), (12, 48, 0), (2, 80, 1)),
    "wide int8": ((1, 700, 0), (6, 100, 0), (16, 32, 0)),
    "wide int4": ((12, 48, 0), (1, 200, 0), (3, 300, 0)),
    "even int8": ((3, 400, 0), (24, 24, 0), (1, 64, 0)),
    "even int4": ((1, 48, 0), (6, 160, 0), (2, 500, 0)),
    "eyes int8": ((1, 64, 1), (12, 64, 0), (3, 96, 1)),
    "eyes int4": ((4, 96, 1), (1, 300, 0), (24, 32, 0)),
}
DEVELOPMENT = (
    Shape(name="dev-a", hidden=960, layers=10, heads=15, kv_heads=5, intermediate=2560,
          tower=Tower(hidden=512, layers=6, heads=8, intermediate=2048)),
)  # fmt: skip
ASKED_THERE = {
    "dev-a int8": ((1, 150, 0), (5, 90, 0), (14, 40, 0), (2, 350, 0), (1, 80, 1), (20, 28, 0)),
    "dev-a int4": ((1, 80, 0), (4, 120, 0), (10, 40, 0), (28, 24, 0), (3, 90, 1), (2, 100, 1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", type=Path, required=True, help="of `triptych measure`, on this machine")
    parser.add_argument("--base", type=Path, required=True, help="a SmolVLM's bundle, for tokenizer and marks")
    parser.add_argument("--development", action="store_true", help="other shapes and combinations, to tune by")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    asked = parser.parse_args()
    ends = time.monotonic() + asked.seconds
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / ("development.jsonl" if asked.development else "samples.jsonl")
    unseen, combinations = (DEVELOPMENT, ASKED_THERE) if asked.development else (UNSEEN, ASKED)
    seeds = itertools.count(FIRST_SEED)
    with opened(KNOWN[0], PRECISIONS[0], asked.base) as beside:
        for shape, precision in models(unseen):
            name = f"{shape.name} {precision}"
            if name not in samples(path) and time.monotonic() < ends:
                try:
                    with opened(shape, precision, asked.base) as session:
                        entry = measure(name, session, beside, combinations.get(name, ()), seeds)
                except MeasurementError as error:
                    Console().print(f"{name}: {error}")
                else:
                    with path.open("a") as file:
                        file.write(json.dumps(entry) + "\n")
    have = samples(path)
    missing = [f"{s.name} {p}" for s, p in models(unseen) if f"{s.name} {p}" not in have]
    if missing:
        Console().print(f"still to be measured: {', '.join(missing)}")
    if not any(name.startswith("known") for name in missing):
        report(have, msgspec.json.decode(asked.machine.read_bytes(), type=DeviceSpec), asked.json)


def models(unseen: Sequence[Shape]) -> Iterator[tuple[Shape, Precision]]:
    """Known and unseen ones in turn, so that both see the machine in the same moods."""
    each = [[(shape, precision) for shape in shapes for precision in PRECISIONS] for shapes in (KNOWN, unseen)]
    for index in range(max(map(len, each))):
        yield from each[0][index : index + 1]
        yield from each[1][index : index + 1]


def samples(path: Path) -> dict[str, Entry]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["model"]: entry for entry in map(json.loads, lines)}


def opened(shape: Shape, precision: Precision, base: Path) -> Session:
    bundle = make(shape, {"decoder": precision, "vision": "int8"}, base, FOLDER)
    return Session.open(bundle.path, config=EngineConfig(num_threads=NUM_THREADS, max_model_len=2048))


def measure(
    name: str, session: Session, beside: Session, asked: Sequence[tuple[int, int, int]], seeds: Iterator[int]
) -> Entry:
    """Rounds of a model's steps, and between these the combinations, each time in other words."""
    began_s = time.monotonic()
    runs: dict[tuple[int, int, int], list[Traffic]] = {one: [] for one in asked}
    moods: list[Mood] = []
    for one in asked:
        warm_up(session, workload(*one, next(seeds)))
    steps = Steps(session)
    for _ in range(ROUNDS):
        moods.append(mood(beside, seeds))
        todo = list(TIMES * tuple(asked))
        for index, _ in enumerate(steps.measure()):
            if todo and index % 2:
                one = todo.pop(0)
                runs[one].append(undisturbed(partial(combine, session, one, seeds)))
        moods.append(mood(beside, seeds))
    Console().print(f"{name}: {time.monotonic() - began_s:.0f} s")
    return {
        "model": name,
        "seen": msgspec.to_builtins(steps.seen()),
        "mood": {kind: statistics.median(mood[kind] for mood in moods) for kind in moods[0]},
        "combinations": [
            {"batch": batch, "prompt": prompt, "images": images, **figures(found)}
            for (batch, prompt, images), found in runs.items()
        ],
    }


def combine(session: Session, one: tuple[int, int, int], seeds: Iterator[int]) -> Traffic:
    """As many requests at once as the batch has."""
    work = workload(*one, next(seeds))
    return run(session, work, jobs(session, work))


def mood(beside: Session, seeds: Iterator[int]) -> Mood:
    """Seconds of a small model's steps: of four answers, and of a prompt."""
    answers = [undisturbed(partial(combine, beside, (4, 32, 0), seeds)) for _ in range(2)]
    prompts = [undisturbed(partial(combine, beside, (1, 128, 0), seeds)) for _ in range(2)]
    return {
        "answers": statistics.median(each.tpot_s or 0.0 for traffic in answers for each in traffic.served),
        "prompts": statistics.median(traffic.served[0].ttft_s or 0.0 for traffic in prompts),
    }


def workload(batch: int, prompt: int, images: int, seed: int) -> Workload:
    """prompt: tokens of text."""
    same = [Sizes(least=tokens, most=tokens) for tokens in (prompt, ANSWER)]
    kind = RequestKind(name="one", share=1, prompt=same[0], answer=same[1], images=images, image_side=SIDE)
    return Workload(
        name="combination", kinds=(kind,), arrivals="closed", concurrency=batch, num_requests=batch, seed=seed
    )


def figures(runs: Sequence[Traffic]) -> Entry:
    """Medians of requests, by run. prompt_tokens: visual ones among them."""
    of: dict[str, Callable[[Traffic], float]] = {
        "tokens_per_s": lambda run: run.tokens_per_s,
        "tpot_s": lambda run: statistics.median(one.tpot_s or 0.0 for one in run.served),
        "ttft_s": lambda run: statistics.median(one.ttft_s or 0.0 for one in run.served),
    }
    first = runs[0].served[0]
    measured = {name: [figure(run) for run in runs] for name, figure in of.items()}
    return {"measured": measured, "prompt_tokens": first.prompt_tokens, "tiles": first.tiles}


# ── predictions ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Row(NamedTuple):
    """A combination and what was said of it. reach: of the interval that should hold nine of ten."""

    model: str
    asked: Entry
    told: dict[str, float]
    reach: float

    def measured(self, name: str) -> float:
        runs: list[float] = self.asked["measured"][name]
        return statistics.median(runs)

    def error(self, name: str) -> float:
        return self.told[name] / self.measured(name) - 1

    def holds(self, name: str, measured: float) -> bool:
        return self.told[name] / self.reach <= measured <= self.told[name] * self.reach


def report(have: dict[str, Entry], machine: DeviceSpec, out: Path | None) -> None:
    console, found, kinds = Console(width=150), [], {OWN: by_own(have), OTHERS: by_others(have, machine)}
    for kind, rows in kinds.items():
        console.print(table(kind, rows))
        found += measures(kind, rows)
    for entry in found:
        console.print(f"{entry.subject}: {entry.name} {entry.value:.1f} {entry.unit}")
    if out is not None:
        settings = {"answer": ANSWER, "runs": ROUNDS * TIMES, "combinations": len(kinds[OWN])}
        told = [
            {"model": row.model, "kind": kind, **row.asked, "told": row.told, "reach": row.reach}
            for kind, rows in kinds.items()
            for row in rows
        ]
        record.write(out, record.record("plan_error", found, targets(found), settings) | {"rows": told})


def by_own(have: dict[str, Entry]) -> list[Row]:
    """By the model's own StepCost."""
    rows = []
    for model, entry in have.items():
        seen = msgspec.convert(entry["seen"], Seen)
        cost = fit_costs(seen.steps, seen.tiles, Fitted(device="", weights_digest=model, settings=""))
        costs = from_costs(cost)
        rows += [Row(model, asked, predict(costs, asked), 1 + cost.error) for asked in entry["combinations"]]
    return rows


def by_others(have: dict[str, Entry], machine: DeviceSpec) -> list[Row]:
    """By the machine's figures and what the known shapes' steps took."""
    usual = {kind: statistics.median(entry["mood"][kind] for entry in have.values()) for kind in ("answers", "prompts")}
    slow = {model: {kind: entry["mood"][kind] / usual[kind] for kind in usual} for model, entry in have.items()}
    seen, ratios = [], []
    for shape, precision in itertools.product(KNOWN, PRECISIONS):
        name, spec, held = f"{shape.name} {precision}", spec_of(shape), held_of(precision)
        found = msgspec.convert(have[name]["seen"], Seen)
        steps = tuple(
            replace(step, seconds=tuple(s / slow[name]["answers" if step.answers else "prompts"] for s in step.seconds))
            for step in found.steps
        )
        seen.append(SeenModel(spec=spec, held=held, steps=steps))
        line = Roofline(spec=spec, held=held, device=machine)
        ratios += [
            point.seconds / slow[name]["prompts"] / line.tile_s(int(point.size)) for point in found.tiles if point.size
        ]
    fitted = fit_efficiency(machine, seen)
    here = replace(machine, efficiency=replace(fitted, tower=statistics.median(ratios)))
    rows = []
    for model, entry in have.items():
        shape, precision = _named(model)
        costs = slowed(Roofline(spec=spec_of(shape), held=held_of(precision), device=here), slow[model])
        rows += [Row(model, asked, predict(costs, asked), 1 + fitted.error) for asked in entry["combinations"]]
    return rows


def slowed(line: Roofline, by: Mood) -> Costs:
    return Costs(
        step_s=lambda step: line.step_s(step) * by["answers" if step.answers else "prompts"],
        tiles_s=lambda tiles: line.tile_s(tiles) * by["prompts"],
    )


def predict(costs: Costs, asked: Entry) -> dict[str, float]:
    one = Ask(prompt_tokens=asked["prompt_tokens"], answer_tokens=ANSWER, tiles=asked["tiles"])
    told = play([one] * asked["batch"], costs, Rules(), callers=asked["batch"])
    return {
        "ttft_s": statistics.median(each.ttft_s for each in told),
        "tpot_s": statistics.median(each.tpot_s for each in told),
        "tokens_per_s": ANSWER * len(told) / max(each.done_s for each in told),
    }


def table(kind: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=f"predicted by {kind}: measured, predicted and the error; beyond 10 % it is a miss")
    for column in ("model", "batch", "prompt", "images", "tokens/s", "", "", "TPOT ms", "", "", "TTFT ms", "", ""):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        cells = [row.model, *(str(row.asked[name]) for name in ("batch", "prompt", "images"))]
        for name, scale in (("tokens_per_s", 1.0), ("tpot_s", 1e3), ("ttft_s", 1e3)):
            error = row.error(name)
            colour = "red" if abs(error) > 0.1 else "green" if abs(error) <= 0.05 else "default"
            both = (row.measured(name), row.told[name])
            cells += [*(f"{scale * one:,.1f}" for one in both), f"[{colour}]{error:+.1%}[/]"]
        shown.add_row(*cells)
    return shown


def measures(kind: str, rows: Sequence[Row]) -> list[record.Measure]:
    found = []
    for name in ("tokens_per_s", "tpot_s", "ttft_s"):
        errors = [100 * abs(row.error(name)) for row in rows]
        inside = [100 * row.holds(name, row.measured(name)) for row in rows]
        runs = [100 * row.holds(name, one) for row in rows for one in row.asked["measured"][name]]
        for title, of, value in (
            (f"{name} error, median", errors, np.median(errors)),
            (f"{name} error, p90", errors, np.percentile(errors, 90)),
            (f"{name}, inside its interval", inside, np.mean(inside)),
            (f"{name}, single runs inside it", runs, np.mean(runs)),
        ):
            entry = record.measure(title, kind, "%", [float(one) for one in of])
            found.append(dataclasses.replace(entry, value=float(value)))
    return found


def targets(found: Sequence[record.Measure]) -> list[record.Target]:
    bounds = {
        "tokens_per_s error, median": 5.0,
        "tokens_per_s error, p90": 10.0,
        "tpot_s error, median": 5.0,
        "tpot_s error, p90": 10.0,
        "ttft_s error, median": 10.0,
    }
    made = []
    for one in found:
        kept = {"at_most": bounds[one.name]} if one.name in bounds else {"at_least": 90.0}
        if one.name in bounds or one.name.endswith("inside its interval"):
            made.append(record.Target(name=f"{one.subject}: {one.name}", value=one.value, unit="%", **kept))
    return made


def spec_of(shape: Shape) -> Any:
    precision = PRECISIONS[0]
    from triptych.core.bundle import open_bundle

    return open_bundle(FOLDER / f"{shape.name}-d{precision}-vint8").manifest.spec


def held_of(precision: Precision) -> Held:
    return Held(decoder=precision, vision="int8", projector="int8", embedding="fp32")


def _named(model: str) -> tuple[Shape, Precision]:
    name, precision = model.split()
    shapes = (*KNOWN, *UNSEEN, *DEVELOPMENT)
    return next((s, p) for s in shapes for p in PRECISIONS if (s.name, p) == (name, precision))


if __name__ == "__main__":
    main()
