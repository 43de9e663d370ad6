"""Are predictions right? 24 combinations of shape, precision, batch, prompt and pictures that no fit has seen.

usage: python bench/plan_error.py --machine machine.json [--json OUT] [--seconds 400]

Two kinds of prediction, reported apart. `fitted in this opening`: from the model's own StepCost, which has seen other
batches and prompts of it since it was opened (another opening of the same model may be a quarter faster or slower).
`other shapes`: from the machine's figures and the steps of two other shapes (`KNOWN`), opened apart. A short probe goes
before and after each model; one that was disturbed, by the probe, is measured once more at the end. It resumes: what
was measured lies beside the rivals' models; `--seconds` ends a visit before the next model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import record
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
from triptych.session.steps import Seen, see, undisturbed
from triptych.session.traffic import run, warm_up

FOLDER = Path(__file__).parent / ".rivals" / "plan"
SAMPLES = FOLDER / "samples.jsonl"
ANSWER = 33  # tokens
FIRST_SEED = 10_000_000  # far from those of `see`: a prompt that it has asked is in the prefix cache
REPEATS = 3
OWN, OTHERS = "fitted in this opening", "other shapes"
NUM_THREADS = 2
SIDE = (448, 448)  # pixels of a picture
LEAST_GFLOPS = 90  # of the probe, which alone on the machine makes 130 to 200
PRECISIONS: tuple[Precision, ...] = ("int8", "int4")

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", type=Path, required=True, help="of `triptych measure`, on this machine")
    parser.add_argument("--base", type=Path, required=True, help="a SmolVLM's bundle, for tokenizer and marks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9)
    asked = parser.parse_args()
    ends = time.monotonic() + asked.seconds
    FOLDER.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        have = samples()
        for shape, precision in models():
            if is_disturbed(have.get(f"{shape.name} {precision}")) and time.monotonic() < ends:
                try:
                    keep(measure(shape, precision, asked.base))
                except MeasurementError as error:
                    Console().print(f"{shape.name} {precision}: {error}")
    have = samples()
    missing = [f"{s.name} {p}" for s, p in models() if f"{s.name} {p}" not in have]
    if missing:
        Console().print(f"still to be measured: {', '.join(missing)}")
    if any(name.startswith("known") for name in missing):
        return
    report(have, msgspec.json.decode(asked.machine.read_bytes(), type=DeviceSpec), asked.json)


def models() -> Iterator[tuple[Shape, Precision]]:
    """Known and unseen ones in turn, so that both see the machine in the same moods."""
    each = [[(shape, precision) for shape in shapes for precision in PRECISIONS] for shapes in (KNOWN, UNSEEN)]
    for index, unseen in enumerate(each[1]):
        if index % 2 == 0:
            yield each[0][index // 2]
        yield unseen


def is_disturbed(entry: dict[str, Any] | None) -> bool:
    """Whether it is missing, or others had the machine before or after it."""
    return entry is None or any(mood["product_gflops"] < LEAST_GFLOPS for mood in entry["probe"])


def samples() -> dict[str, dict[str, Any]]:
    lines = SAMPLES.read_text().splitlines() if SAMPLES.exists() else []
    return {entry["model"]: entry for entry in map(json.loads, lines)}


def keep(entry: dict[str, Any]) -> None:
    with SAMPLES.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def measure(shape: Shape, precision: Precision, base: Path) -> dict[str, Any]:
    """A model's steps, then its combinations, each a few times with other words."""
    bundle = make(shape, {"decoder": precision, "vision": "int8"}, base, FOLDER)
    config = EngineConfig(num_threads=NUM_THREADS, max_model_len=2048)
    before = probe()
    with Session.open(bundle.path, config=config) as session:
        seen = see(session)
        combinations = ASKED.get(f"{shape.name} {precision}", ())
        found = [list(combine(session, *combination)) for combination in combinations]
    Console().print(f"{shape.name} {precision}")
    return {
        "model": f"{shape.name} {precision}",
        "seen": msgspec.to_builtins(seen),
        "combinations": [
            {"batch": batch, "prompt": prompt, "images": images, **mean}
            for (batch, prompt, images), mean in zip(combinations, map(middle, found), strict=True)
        ],
        "probe": [before, probe()],
    }


def combine(session: Session, batch: int, prompt: int, images: int) -> Iterator[Traffic]:
    """All requests at once, as many as the batch has. prompt: tokens of text."""
    seeds = itertools.count(FIRST_SEED)

    def one() -> Traffic:
        work = workload(batch, prompt, images, next(seeds))
        return run(session, work, jobs(session, work))

    warm_up(session, workload(batch, prompt, images, next(seeds)))
    for _ in range(REPEATS):
        yield undisturbed(one)


def workload(batch: int, prompt: int, images: int, seed: int) -> Workload:
    same = [Sizes(least=tokens, most=tokens) for tokens in (prompt, ANSWER)]
    kind = RequestKind(name="one", share=1, prompt=same[0], answer=same[1], images=images, image_side=SIDE)
    return Workload(
        name="combination", kinds=(kind,), arrivals="closed", concurrency=batch, num_requests=batch, seed=seed
    )


def middle(runs: Sequence[Traffic]) -> dict[str, Any]:
    """Medians of requests, then of runs. prompt_tokens: visual ones among them."""
    figures: dict[str, Callable[[Traffic], float]] = {
        "ttft_s": lambda run: statistics.median(one.ttft_s or 0.0 for one in run.served),
        "tpot_s": lambda run: statistics.median(one.tpot_s or 0.0 for one in run.served),
        "tokens_per_s": lambda run: run.tokens_per_s,
    }
    each = {name: [figure(run) for run in runs] for name, figure in figures.items()}
    first = runs[0].served[0]
    return {
        "measured": {name: statistics.median(values) for name, values in each.items()},
        "runs": each,
        "prompt_tokens": first.prompt_tokens,
        "tiles": first.tiles,
    }


def probe() -> dict[str, float]:
    """The machine's mood: reads from memory and products of matrices, the best of a few."""
    numbers, square = np.ones(1 << 24, np.float32), np.ones((512, 512), np.float32)
    reads, products = [], []
    for _ in range(8):
        began = time.perf_counter()
        numbers.sum()
        reads.append(time.perf_counter() - began)
        began = time.perf_counter()
        square @ square
        products.append(time.perf_counter() - began)
    return {
        "read_gb_per_s": numbers.nbytes / min(reads) / 1e9,
        "product_gflops": 2 * 512**3 / statistics.median(products) / 1e9,
    }


# ── predictions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def report(have: dict[str, dict[str, Any]], machine: DeviceSpec, out: Path | None) -> None:
    console, found = Console(width=150), []
    for kind, costs_of in ((OWN, by_own(have)), (OTHERS, by_others(have, machine))):
        rows = [
            (entry["model"], asked, predict(costs_of(entry["model"]), asked))
            for entry in have.values()
            for asked in entry["combinations"]
        ]
        console.print(table(kind, rows))
        found += measures(kind, rows)
    for entry in found:
        console.print(f"{entry.subject}: {entry.name} {entry.value:.1f} {entry.unit}")
    if out is not None:
        settings = {"answer": ANSWER, "repeats": REPEATS, "combinations": sum(map(len, _asked(have)))}
        record.write(out, record.record("plan_error", found, targets(found), settings) | {"rows": _rows(have, machine)})


def by_others(have: dict[str, dict[str, Any]], machine: DeviceSpec) -> Callable[[str], Costs]:
    """By the machine's figures and what the known shapes' steps took."""
    seen = [
        SeenModel(spec=spec_of(shape), held=held_of(precision), steps=_seen(have, shape, precision).steps)
        for shape in KNOWN
        for precision in PRECISIONS
    ]
    fitted = fit_efficiency(machine, seen)
    ratios = [
        point.seconds / Roofline(spec=spec_of(shape), held=held_of(precision), device=machine).tile_s(int(point.size))
        for shape in KNOWN
        for precision in PRECISIONS
        for point in _seen(have, shape, precision).tiles
        if point.size
    ]
    fitted = msgspec.structs.replace(fitted, tower=statistics.median(ratios))
    here = msgspec.structs.replace(machine, efficiency=fitted)

    def costs_of(model: str) -> Costs:
        shape, precision = _named(model)
        line = Roofline(spec=spec_of(shape), held=held_of(precision), device=here)
        return Costs(step_s=line.step_s, tiles_s=line.tile_s)

    return costs_of


def by_own(have: dict[str, dict[str, Any]]) -> Callable[[str], Costs]:
    """By the model's own StepCost."""

    def costs_of(model: str) -> Costs:
        seen = _seen(have, *_named(model))
        return from_costs(fit_costs(seen.steps, seen.tiles, Fitted(device="", weights_digest=model, settings="")))

    return costs_of


def predict(costs: Costs, asked: dict[str, Any]) -> dict[str, float]:
    one = Ask(prompt_tokens=asked["prompt_tokens"], answer_tokens=ANSWER, tiles=asked["tiles"])
    told = play([one] * asked["batch"], costs, Rules(), callers=asked["batch"])
    return {
        "ttft_s": statistics.median(each.ttft_s for each in told),
        "tpot_s": statistics.median(each.tpot_s for each in told),
        "tokens_per_s": ANSWER * len(told) / max(each.done_s for each in told),
    }


Row = tuple[str, dict[str, Any], dict[str, float]]


def table(kind: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=f"predicted by {kind}: measured, predicted and the error; beyond 10 % it is a miss")
    for column in ("model", "batch", "prompt", "images", "tokens/s", "", "", "TPOT ms", "", "", "TTFT ms", "", ""):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for model, asked, told in rows:
        cells = [model, str(asked["batch"]), str(asked["prompt"]), str(asked["images"])]
        for name, scale in (("tokens_per_s", 1.0), ("tpot_s", 1e3), ("ttft_s", 1e3)):
            real = asked["measured"][name]
            error = told[name] / real - 1
            colour = "red" if abs(error) > 0.1 else "green" if abs(error) <= 0.05 else "default"
            cells += [f"{scale * real:,.1f}", f"{scale * told[name]:,.1f}", f"[{colour}]{error:+.1%}[/]"]
        shown.add_row(*cells)
    return shown


def measures(kind: str, rows: Sequence[Row]) -> list[record.Measure]:
    found = []
    for name in ("tokens_per_s", "tpot_s", "ttft_s"):
        errors = [100 * abs(told[name] / asked["measured"][name] - 1) for _, asked, told in rows]
        for share, middle_error in (("median", np.median(errors)), ("p90", np.percentile(errors, 90))):
            found.append(
                record.Measure(
                    name=f"{name} error, {share}", subject=kind, unit="%", value=float(middle_error),
                    lowest=min(errors), highest=max(errors), num_samples=len(errors),
                )
            )  # fmt: skip
    return found


def targets(found: Sequence[record.Measure]) -> list[record.Target]:
    bounds = {"tokens_per_s": (5.0, 10.0), "tpot_s": (5.0, 10.0), "ttft_s": (10.0, None)}
    made = []
    for entry in found:
        name, share = entry.name.removesuffix(", median").removesuffix(", p90").split()[0], entry.name.split()[-1]
        bound = bounds[name][share == "p90"]
        if bound is not None:
            made.append(
                record.Target(name=f"{entry.subject}: {entry.name}", value=entry.value, unit="%", at_most=bound)
            )
    return made


def _rows(have: dict[str, dict[str, Any]], machine: DeviceSpec) -> list[dict[str, Any]]:
    """Every combination with what both kinds said of it."""
    kinds = {OWN: by_own(have), OTHERS: by_others(have, machine)}
    return [
        {
            "model": entry["model"],
            **{name: asked[name] for name in ("batch", "prompt", "images", "measured")},
            "predicted": {kind: predict(costs_of(entry["model"]), asked) for kind, costs_of in kinds.items()},
            "probe": entry["probe"],
        }
        for entry in have.values()
        for asked in entry["combinations"]
    ]


def spec_of(shape: Shape) -> Any:
    precision = PRECISIONS[0]
    from triptych.core.bundle import open_bundle

    return open_bundle(FOLDER / f"{shape.name}-d{precision}-vint8").manifest.spec


def held_of(precision: Precision) -> Held:
    return Held(decoder=precision, vision="int8", projector="int8", embedding="fp32")


def _named(model: str) -> tuple[Shape, Precision]:
    name, precision = model.split()
    return next((s, p) for s in (*KNOWN, *UNSEEN) for p in PRECISIONS if (s.name, p) == (name, precision))


def _seen(have: dict[str, dict[str, Any]], shape: Shape, precision: Precision) -> Seen:
    return msgspec.convert(have[f"{shape.name} {precision}"]["seen"], Seen)


def _asked(have: dict[str, dict[str, Any]]) -> Iterator[list[Any]]:
    for entry in have.values():
        yield entry["combinations"]


if __name__ == "__main__":
    main()
