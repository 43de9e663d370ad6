"""Forgetting: sequences and answers a second in the same KV memory, and what each way to forget costs.

usage: python bench/kv.py BUNDLE --json bench/results/kv.json [--rounds 2] [--every 3] [--only capacity|quality]

BUNDLE is triptych-mini with a KV policy (`triptych compress demo`, then `compile`). The conversations are the long ones
of bench/compression/tasks.py. Capacity: every setting in a process of its own, one after another, round by round, all
with as many bytes of cache. Quality: forgetting/quality.py, on the whole cache's own answers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import record
from record import Measure, Target, measure

HERE = Path(__file__).parent
KV_BYTES = 120_000_000
THIRD = 0.58  # of a u8 cache's tokens: with u8's 72 bytes a row for bf16's 128, a third of bf16's bytes
SETTINGS: dict[str, tuple[str, ...]] = {
    "bf16": ("--cache", "bf16"),
    "u8": ("--cache", "u8"),
    "u4": ("--cache", "u4"),
    "u8, forgetting": ("--cache", "u8", "--budget", str(THIRD)),
}
BEST = "u8, forgetting"
UNITS = {
    "running": "sequences",
    "decode_per_s": "tokens/s",
    "answers_per_s": "tokens/s",
    "step_ms": "ms",
    "blocks_a_sequence": "blocks",
    "compactions": "times",
    "compaction_ms": "ms a compaction",
    "preemptions": "times",
}


def capacity(bundle: Path, rounds: int, requests: int) -> list[Measure]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(rounds):
        for name, flags in SETTINGS.items():
            found[name].append(_one(bundle, flags, requests))
            print(name, found[name][-1], flush=True)
    return [
        measure(figure, name, unit, [run[figure] for run in runs])
        for name, runs in found.items()
        for figure, unit in UNITS.items()
    ]


def _one(bundle: Path, flags: tuple[str, ...], requests: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "forgetting" / "capacity.py"), str(bundle), str(out), *flags]
        subprocess.run(
            [*command, "--bytes", str(KV_BYTES), "--requests", str(requests)], check=True, capture_output=True
        )
        found: dict[str, Any] = json.loads(out.read_text())
    return found | {"compaction_ms": 1e3 * found["compaction_s"] / max(1, found["compactions"])}


def quality(bundle: Path, every: int, out: Path) -> list[Measure]:
    command = [
        sys.executable,
        str(HERE / "forgetting" / "quality.py"),
        str(bundle),
        str(out),
        "--every",
        str(every),
        "--judge",
    ]
    subprocess.run(command, check=True)
    return summed(out)


def summed(lines: Path) -> list[Measure]:
    """Every cell's figures over all questions."""
    cells: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines.read_text().splitlines():
        for name, cell in json.loads(line)["cells"].items():
            cells[name].append(cell)
    found = []
    for name, runs in cells.items():
        found.append(measure("right answers", name, "share", [float(np.mean([run["right"] for run in runs]))]))
        if name != "full":
            kld = np.concatenate([run["kld"] for run in runs])
            found += [
                measure("KL divergence", name, "nats", [float(kld.mean())]),
                measure("KL divergence, 99 %", name, "nats", [float(np.quantile(kld, 0.99))]),
                measure("same top token", name, "share", [float(np.mean(np.concatenate([r["same"] for r in runs])))]),
                measure("kept", name, "share", [float(np.mean([run["kept"] for run in runs]))]),
                measure("time to forget", name, "ms", [1e3 * run["seconds"] for run in runs]),
            ]
    return found


def targets(measures: list[Measure]) -> list[Target]:
    value = {(each.name, each.subject): each.value for each in measures}
    promised = [
        ("sequences at once, bf16 uncompressed = 1", "running", BEST, "bf16", 2.0),
        ("decode tokens/s where memory is the limit, bf16 = 1", "decode_per_s", BEST, "bf16", 1.5),
        ("right answers, whole cache = 1", "right answers", f"snapkv:{THIRD}", "full", 0.95),
    ]
    return [
        Target(name=name, value=value[figure, one] / value[figure, other], unit="×", at_least=least)
        for name, figure, one, other, least in promised
        if (figure, one) in value and (figure, other) in value
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--only", choices=["capacity", "quality"])
    asked = parser.parse_args()
    measures: list[Measure] = []
    if asked.only != "quality":
        measures += capacity(asked.bundle, asked.rounds, asked.requests)
    if asked.only != "capacity":
        measures += quality(asked.bundle, asked.every, asked.json.with_suffix(".jsonl"))
    settings = {"kv_bytes": KV_BYTES, "requests": asked.requests, "every": asked.every, "settings": SETTINGS}
    record.write(asked.json, record.record("kv", measures, targets(measures), settings))
    for target in targets(measures):
        print(f"{target.name}: {target.value:.2f} (at least {target.at_least})")


if __name__ == "__main__":
    main()
