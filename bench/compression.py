"""What compression costs and gives: recipes × visual tokens × KV cache, beside fp32, NNCF and llama.cpp, in one table.

usage: python bench/compression.py --json bench/results/compression.json --html bench/results/compression.html [--quick]

Three things are measured of each cell, each in a process of its own: its answers to questions with known truth, how far
its logits are from fp32's on fp32's own words (forced through the served path), and its times. The first two are the
same on a busy machine and are kept under bench/.rivals/compression, keyed by the bundle's weights, the settings and the
questions; a broken run goes on where it stopped. Times come from interleaved rounds, one process at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import record
from compression import decoders, tasks
from compression.cells import BUDGET, EVICTIONS, NEVER, REFERENCE, THIRD, WHOLE, Cell, cells, corners
from compression.page import page
from compression.table import rows, targets
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
WORK = HERE / ".rivals" / "compression"
TRIPTYCH = Path(sys.executable).with_name("triptych")
COMPILED = {"fp32": ("--weights", "fp32"), "bf16": ("--weights", "bf16"), "int8": ()}
CAPACITIES = (
    Cell(recipe="int8", cache="bf16"),
    Cell(recipe="int8"),
    Cell(recipe="int8", evict=f"{EVICTIONS[0]}:{THIRD}"),
    Cell(recipe="int8", evict=f"{EVICTIONS[0]}:{BUDGET}"),
)


@dataclass(slots=True)
class Bench:
    """Where things lie, and what could not be had."""

    console: Console
    missing: dict[str, str] = field(default_factory=dict)  # recipe or rival → reason

    # ── bundles ────────────────────────────────────────────────────────────────────────────────────────────────

    def bundle(self, recipe: str, checkpoint: Path, label: str = "") -> Path | None:
        """The recipe's bundle of `checkpoint`, made on first need; None when the product refused, with its reason."""
        target = WORK / "bundles" / f"{label}{recipe}"
        if (target / "bundle.json").is_file() or recipe in self.missing:
            return target if (target / "bundle.json").is_file() else None
        source, options = checkpoint, COMPILED.get(recipe)
        if options is None:
            source = WORK / "compressed" / f"{label}{recipe}"
            calibration = ("--calibrate", decoders.samples() if label else tasks.FOLDER / "calibrate.jsonl")
            made = (source / "config.json").is_file()
            if not made and not self._triptych(
                recipe, "compress", checkpoint, "-o", source, "--recipe", recipe, *calibration
            ):
                return None
        return target if self._triptych(recipe, "compile", source, "-o", target, *(options or ())) else None

    def _triptych(self, recipe: str, *arguments: Any) -> bool:
        self.console.print(f"triptych {' '.join(map(str, arguments))}", highlight=False)
        done = subprocess.run([TRIPTYCH, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode:
            self.missing[recipe] = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            self.console.print(f"[red]{recipe} is left out: {self.missing[recipe]}[/]")
        return done.returncode == 0

    # ── one cell ───────────────────────────────────────────────────────────────────────────────────────────────

    def folder(self, cell: Cell, bundle: Path) -> Path:
        digest = json.loads((bundle / "bundle.json").read_text())["weights_digest"]
        key = hashlib.sha256(json.dumps([digest, asdict(cell), tasks.digest()]).encode()).hexdigest()[:16]
        folder = WORK / "cells" / key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cell.json").write_text(json.dumps(asdict(cell)))
        return folder

    def served(self, task: str, cell: Cell, bundle: Path, name: str | None = None) -> dict[str, Any] | None:
        """What compression/served.py says of a cell, from disk where it was said before; None if it failed."""
        folder = self.folder(cell, bundle)
        target = folder / f"{name or task}.json"
        if not target.is_file():
            reference = self.folder(REFERENCE, WORK / "bundles" / REFERENCE.recipe)
            command = [sys.executable, HERE / "compression" / "served.py", task, bundle, folder / "cell.json"]
            with (folder / f"{task}.log").open("w") as log:
                done = subprocess.run([*command, target.with_suffix(".part"), reference], stdout=log, stderr=log)
            if done.returncode:
                said = (folder / f"{task}.log").read_text().strip().splitlines()
                self.missing[cell.name] = (said or ["no reason given"])[-1][-300:]
                return None
            target.with_suffix(".part").rename(target)
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<56}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def each(console: Console, what: str, items: Iterable[Any], name: Callable[[Any], str]) -> Iterable[Any]:
    """The items one by one, with a bar."""
    listed = list(items)
    with bar(console) as progress:
        task = progress.add_task(what, total=len(listed))
        for item in listed:
            progress.update(task, description=f"{what}: {name(item)}")
            yield item
            progress.advance(task)


# ── the stages ─────────────────────────────────────────────────────────────────────────────────────────────────────


def quality(bench: Bench, wanted: list[Cell], bundles: dict[str, Path]) -> dict[Cell, dict[str, Any]]:
    """Each cell's answers and divergences; the reference comes first, since the others are held against it."""
    found: dict[Cell, dict[str, Any]] = {}
    for cell in each(bench.console, "answers", wanted, lambda cell: cell.name):
        had = bench.served("quality", cell, bundles[cell.recipe])
        if had:
            found[cell] = had
    return found


def times(bench: Bench, wanted: list[Cell], bundles: dict[str, Path], rounds: int) -> dict[Cell, list[dict[str, Any]]]:
    """A B C …, A B C …: so that a slow minute falls on all."""
    found: dict[Cell, list[dict[str, Any]]] = defaultdict(list)
    turns = [(number, cell) for number in range(1, rounds + 1) for cell in wanted]
    for number, cell in each(bench.console, "times", turns, lambda turn: f"{turn[0]} {turn[1].name}"):
        had = bench.served("speed", cell, bundles[cell.recipe], f"speed-{number}")
        if had:
            found[cell].append(had)
    return found


def capacity(bench: Bench, bundles: dict[str, Path], rounds: int) -> dict[Cell, list[dict[str, Any]]]:
    """Long conversations in one fixed amount of cache memory."""
    found: dict[Cell, list[dict[str, Any]]] = defaultdict(list)
    turns = [(number, cell) for number in range(1, rounds + 1) for cell in CAPACITIES if cell.recipe in bundles]
    for number, cell in each(bench.console, "capacity", turns, lambda turn: f"{turn[0]} {turn[1].name}"):
        had = bench.served("capacity", cell, bundles[cell.recipe], f"capacity-{number}")
        if had:
            found[cell].append(had)
    return found


def timed(wanted: list[Cell]) -> list[Cell]:
    """Those whose times are told: every recipe and cache, the default reduction and eviction, and the corners."""
    shown = {WHOLE, "cenprune:0.5", "cenprune:0.33"}
    ends = set(corners())
    return [
        cell
        for cell in wanted
        if cell in ends or (cell.reduce in shown and cell.evict.partition(":")[0] in {NEVER, EVICTIONS[0]})
    ]


def bare(bench: Bench) -> list[dict[str, Any]]:
    """The dithered decoder in few bits: our recipes, NNCF, llama.cpp."""
    if not (decoders.DITHERED / "held_out.npy").is_file():
        bench.missing["dithered decoder"] = "run bench/rivals/install.py compression"
        return []
    windows, reference = decoders.DITHERED / "held_out.npy", WORK / "dithered.f32"
    fp32 = bench.bundle("fp32", decoders.DITHERED, "dithered-")
    if fp32 is None:
        return []
    if not reference.is_file():
        import numpy as np

        decoders.write_reference(fp32, np.load(windows), reference)
    entries = decoders.rivals()
    for recipe in ("int8", "w4"):
        bundle = bench.bundle(recipe, decoders.DITHERED, "dithered-")
        if bundle is not None:
            entries += decoders.ours(recipe, bundle)
    found = []
    for rival in each(bench.console, "held-out text", entries, lambda rival: rival.name):
        stamp = f"{rival.name}-{rival.weights[0].stat().st_mtime_ns}".replace(" ", "-").replace(",", "").lower()
        out = WORK / "rivals" / f"{stamp}.json"
        out.parent.mkdir(exist_ok=True)
        had = json.loads(out.read_text()) if out.is_file() else decoders.compare(rival, windows, reference, out)
        found.append(
            {"name": rival.name, "bits": rival.bits, "layer_bits": rival.layer_bits, "remark": rival.remark, **had}
        )
    return found


# ── the whole run ──────────────────────────────────────────────────────────────────────────────────────────────────


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--html", type=Path, help="write the report here")
    parser.add_argument("--quick", action="store_true", help="few cells, one round (no figure counts)")
    parser.add_argument("--only", action="append", default=[], help="a part of a cell's name; may be repeated")
    parser.add_argument("--rounds", type=int, default=2, help="of times; 0: none are measured")
    parser.add_argument("--skip-rivals", action="store_true", help="leave out the bare decoder")
    parser.add_argument("--fresh", action="store_true", help="forget times that were measured before")
    return parser.parse_args()


def chosen(asked: argparse.Namespace) -> list[Cell]:
    every = cells()
    if asked.quick:
        every = [
            REFERENCE,
            Cell(recipe="int8"),
            Cell(recipe="int8", reduce="cenprune:0.5"),
            Cell(recipe="int8", cache="u4"),
        ]
    return [
        cell for cell in every if cell.is_reference or not asked.only or any(part in cell.name for part in asked.only)
    ]


def main() -> None:
    asked, console = arguments(), Console(width=None if sys.stdout.isatty() else 150)
    started, busy = time.perf_counter(), record.busy_share()
    if busy > 0.1:
        console.print(f"[bold red]the machine is {busy:.0%} busy: no time of this run counts[/]")
    if asked.fresh:
        for path in (WORK / "cells").glob("*/*-[0-9]*.json"):
            path.unlink()
    from triptych.compile.mini import assemble
    from triptych.session.opening import CACHE

    bench, wanted = Bench(console), chosen(asked)
    checkpoint = assemble(CACHE)
    made = {recipe: bench.bundle(recipe, checkpoint) for recipe in dict.fromkeys(cell.recipe for cell in wanted)}
    bundles = {recipe: bundle for recipe, bundle in made.items() if bundle is not None}
    wanted = [cell for cell in wanted if cell.recipe in bundles]
    had = quality(bench, wanted, bundles)
    text = [] if asked.skip_rivals else bare(bench)
    rounds = 1 if asked.quick else asked.rounds
    speeds = times(bench, [cell for cell in timed(wanted) if cell in had], bundles, rounds)
    room = {} if asked.quick else capacity(bench, bundles, min(rounds, 2))
    table = rows(had, speeds, room, bundles, text)
    aims = targets(table)
    about = {"busy_before": busy, "seconds": time.perf_counter() - started, "quick": asked.quick, "rounds": rounds,
             "tasks": tasks.digest(), "missing": bench.missing}  # fmt: skip
    content = record.record("compression", [], aims, about) | table
    if asked.json:
        record.write(asked.json, content)
    if asked.html:
        asked.html.write_text(page(content))
    for aim in aims:
        console.print(f"{'met ' if aim.is_met else 'MISSED'}  {aim.name}: {aim.value:.4g} {aim.unit}", highlight=False)


if __name__ == "__main__":
    main()
