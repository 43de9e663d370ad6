"""What the demo saves: core-seconds × GB for mixed traffic, at the same quality and latency, factor by factor.

usage: python bench/saving.py --json bench/results/saving.json --html bench/results/saving.html [--stage STAGE …]

The same as `triptych bench saving`, with what surrounds it: both ends again where eight callers keep the engine full,
the demo in torch and transformers beside, and the text half's rivals out of bench/results/engine.json. What was
measured is kept in bench/.rivals/saving.jsonl; `--fresh` forgets it. The stages traffic, full and torch need a quiet
machine (10, 2 and 3 minutes), questions does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import questions
import record
from rich.console import Console

from triptych.cli.compile import progress_bar
from triptych.cli.workloads import read_workload
from triptych.core.bundle import Bundle, open_bundle
from triptych.core.policy import Reduction
from triptych.core.workload import Workload
from triptych.plan.choose import quantiles
from triptych.plan.report import saving_page
from triptych.plan.saving import Run, Saving
from triptych.session.jobs import counts
from triptych.session.saving import SavingConfig, factors_of, judge, measure_saving, plain_bundle, run_ways, schedule

HERE = Path(__file__).parent
WORK = (HERE / ".rivals").resolve()
KEPT, COMMIT = WORK / "saving.jsonl", WORK / "saving.commit"
OURS = WORK / "compression" / "bundles" / "w8"
TORCH = HERE.parent / ".venv-mini" / "bin" / "python"
KEEP = Reduction(method="cenprune", keep=0.5)
CALLERS = 8  # of the full engine
ROUNDS = 2  # of the full engine
STAGES = ("traffic", "full", "torch", "questions")
Beside = list[dict[str, Any]]  # of runs in torch


def config(workload: Workload) -> SavingConfig:
    return SavingConfig(workload=workload, reduction=KEEP, max_num_seqs=CALLERS, num_threads=2, kept=KEPT)


def full(workload: Workload) -> Workload:
    """As many requests again, asked by callers who never wait to ask."""
    return msgspec.structs.replace(
        workload, name=f"{workload.name}, {CALLERS} callers", arrivals="closed", rate_per_s=None, concurrency=CALLERS,
        num_requests=2 * workload.num_requests,
    )  # fmt: skip


def torch_run(workload: Workload) -> dict[str, Any]:
    """The same sizes through transformers, one after another, kept as the others are."""
    rng, asked = np.random.default_rng(0), []
    shares = counts([kind.share for kind in workload.kinds], workload.num_requests)
    for kind, count in zip(workload.kinds, shares, strict=True):
        lengths = zip(quantiles(kind.prompt, count, rng), quantiles(kind.answer, count, rng), strict=True)
        asked += [
            {"prompt_tokens": prompt, "answer_tokens": answer, "images": kind.images, "side": kind.image_side}
            for prompt, answer in lengths
        ]
    out = WORK / f"saving-torch-{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]}.json"
    if not out.is_file():
        requests = out.with_suffix(".asked")
        requests.write_text(json.dumps([asked[place] for place in rng.permutation(len(asked))]))
        done = subprocess.run([TORCH, HERE / "rivals" / "pipeline.py", requests], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"torch: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        out.write_text(done.stdout)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def rivals() -> list[dict[str, Any]]:
    """Sixteen texts at once, each runtime's core-seconds × peak memory, out of the engine bench."""
    found = json.loads((HERE / "results" / "engine.json").read_text())
    values = {(one["subject"], one["name"]): one["value"] for one in found["measures"]}
    names = dict.fromkeys(one["subject"] for one in found["measures"] if one["name"] == "peak")
    return [
        {
            "name": name,
            "cpu_s": values[name, "decode 16, processor time"],
            "peak_bytes": values[name, "peak"],
            "cost": values[name, "decode 16, processor time"] * values[name, "peak"] / 1e9,
            "commit": found["commit"],
        }
        for name in names
    ]


def measures(name: str, runs: Sequence[Run]) -> list[record.Measure]:
    return [
        record.measure("core-seconds × GB", name, "s·GB", [run.cost for run in runs]),
        record.measure("core-seconds", name, "s", [run.cpu_s for run in runs]),
        record.measure("memory", name, "B", [float(run.peak_bytes) for run in runs]),
        record.measure("wall", name, "s", [run.wall_s for run in runs]),
        record.measure("TTFT p95", name, "s", [run.ttft_p95_s for run in runs]),
        record.measure("latency p95", name, "s", [run.latency_p95_s for run in runs]),
    ]


def held(busiest: Sequence[Run]) -> record.Target:
    """All callers answered, cores counted while they are held, used or not: what a machine of one's own costs."""
    costs = [[run.wall_s * run.peak_bytes for run in busiest if bool(run.on) is ours] for ours in (False, True)]
    before, now = (statistics.median(values) for values in costs)
    return record.Target(
        name=f"seconds × GB saved with {CALLERS} callers, cores held all the while", unit="%", at_least=47,
        value=100 * (1 - now / before), lowest=100 * (1 - max(costs[1]) / min(costs[0])),
        highest=100 * (1 - min(costs[1]) / max(costs[0])),
    )  # fmt: skip


def against_both(runs: Sequence[Run], beside: Beside) -> record.Target:
    """The hardest baseline: this engine's core-seconds, which are the fewer, in torch's memory, which is the less."""
    memory = min(run["peak_bytes"] for run in beside)
    plain = [run.cpu_s * min(run.peak_bytes, memory) for run in runs if not run.on]
    most = max(len(run.on) for run in runs)
    ours = [run.cpu_s * run.peak_bytes for run in runs if len(run.on) == most]
    return record.Target(
        name="the same against the lesser of each, core-seconds here and memory in torch", unit="%", at_least=47,
        value=100 * (1 - statistics.median(ours) / statistics.median(plain)),
        lowest=100 * (1 - max(ours) / min(plain)), highest=100 * (1 - min(ours) / max(plain)),
    )  # fmt: skip


def targets(saving: Saving, busiest: Sequence[Run], beside: Beside) -> list[record.Target]:
    assert saving.kept is not None
    late = [
        (name, getattr(saving.ours, key).value / getattr(saving.baseline, key).value)
        for name, key in (("first token", "ttft_p95_s"), ("whole answer", "latency_p95_s"))
    ]
    return [
        record.Target(
            name="core-seconds × GB saved on mixed traffic", value=100 * saving.saved.value, unit="%", at_least=47,
            lowest=100 * saving.saved.lowest, highest=100 * saving.saved.highest,
        ),
        against_both(saving.runs, beside),
        record.Target(
            name="right answers kept of the bf16 pipeline's", value=100 * saving.kept.value, unit="%", at_least=99,
            lowest=100 * saving.kept.lowest, highest=100 * saving.kept.highest,
        ),
        *(record.Target(name=f"p95 to the {name}, ours over the baseline's", value=ratio, unit="×", at_most=1.0)
          for name, ratio in late),
        held(busiest),
    ]  # fmt: skip


def write(asked: argparse.Namespace, saving: Saving, busiest: Sequence[Run], beside: Beside) -> None:
    """The record and the page; and the verdict on the console."""
    ends = {name: [run for run in saving.runs if run.on == cost.on] for name, cost in
            (("baseline", saving.baseline), ("ours", saving.ours))}  # fmt: skip
    loaded = {f"{name}, {CALLERS} callers": [run for run in busiest if run.on == cost.on] for name, cost in
              (("baseline", saving.baseline), ("ours", saving.ours))}  # fmt: skip
    found = [measure for name, runs in (ends | loaded).items() for measure in measures(name, runs)]
    name = "torch and transformers, bf16, one after another"
    found += [
        record.measure("core-seconds × GB", name, "s·GB", [run["cpu_s"] * run["peak_bytes"] / 1e9 for run in beside]),
        record.measure("core-seconds", name, "s", [run["cpu_s"] for run in beside]),
        record.measure("memory", name, "B", [float(run["peak_bytes"]) for run in beside]),
        record.measure("latency p95", name, "s", [run["latency_p95_s"] for run in beside]),
    ]
    aims = targets(saving, busiest, beside)
    about = {"workload": msgspec.to_builtins(saving.workload) | {"samples": None},
             "about": saving.about, "questions": saving.num_questions, "right": saving.right,
             "spread": "extremes of all runs; of the saving, the worst and the best pair"}  # fmt: skip
    effects = [msgspec.to_builtins(effect) for effect in saving.effects]
    content = record.record("saving", found, aims, about) | {"effects": effects, "text_rivals": rivals()}
    content["commit"] = COMMIT.read_text()  # that was measured
    if asked.json:
        record.write(asked.json, content)
    if asked.html:
        asked.html.write_text(saving_page(saving))
    for aim in aims:
        print(f"{'met ' if aim.is_met else 'MISSED'}  {aim.name}: {aim.value:.4g} {aim.unit}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--html", type=Path, help="write the report here")
    parser.add_argument("--stage", action="append", choices=STAGES, help="measure these alone, and write nothing")
    parser.add_argument("--seconds", type=int, help="stop measuring after so long; the next call goes on")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    return parser.parse_args()


def bundles() -> tuple[Bundle, Bundle]:
    if not (OURS / "bundle.json").is_file():
        raise SystemExit(f"{OURS} is missing: run bench/compression.py")
    return open_bundle(OURS), plain_bundle("demo")


def main() -> None:
    asked, console = arguments(), Console(width=None if sys.stdout.isatty() else 150)
    if asked.seconds:
        signal.signal(signal.SIGALRM, lambda *_: sys.exit("time is up: call again"))
        signal.alarm(asked.seconds)
    if asked.fresh:
        for path in (KEPT, COMMIT, *WORK.glob("saving-torch-*")):
            path.unlink(missing_ok=True)
    stages = asked.stage or STAGES
    if set(stages) != {"questions"} and (busy := record.busy_share()) > 0.1:
        console.print(f"[bold red]the machine is {busy:.0%} busy: no time that is measured now counts[/]")
    ours, plain = bundles()
    workload = msgspec.structs.replace(read_workload(str(HERE / "saving.yaml")), samples=str(questions.write()))
    every = config(workload)
    factors = factors_of(ours, plain, every)
    if asked.stage or not COMMIT.is_file():
        COMMIT.write_text(record.commit())
    with progress_bar() as progress:
        if "traffic" in stages:
            run_ways(ours, plain, every, list(schedule(factors, every.rounds)), progress)
        if "full" in stages:
            turns = [(on, turn) for turn in range(ROUNDS) for on in ((), factors)]
            busiest = run_ways(ours, plain, replace(every, workload=full(workload)), turns, progress)
        if "torch" in stages:
            pipeline = [torch_run(workload)]
        if "questions" in stages:
            judge(ours, plain, every, progress)
        if asked.stage is None:
            saving = measure_saving(ours, plain, every, progress)
            write(asked, saving, busiest, pipeline)


if __name__ == "__main__":
    main()
