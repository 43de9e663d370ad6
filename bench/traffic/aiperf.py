"""NVIDIA's aiperf as an outside client: its own load, its own clock, its own arithmetic; we read its report."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from traffic import outside
from traffic.outside import OUTPUT_TOKENS, SIZE, Figure, Plan, Seen
from traffic.served import Served

PACKAGES = ("aiperf",)
# ours: (theirs, what theirs are multiplied with)
NAMES = {
    "TTFT": ("time_to_first_token", 1e-3),
    "TPOT": ("inter_token_latency", 1e-3),
    "whole answer": ("request_latency", 1e-3),
}
LEAST_WORDS = 1  # it sends no picture without a text
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # told so, it takes a tokenizer's folder for a name on the hub


def run(program: Path, served: Served, plan: Plan, folder: Path) -> Seen:
    """What aiperf saw. Raises SystemExit when it failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        str(program), "profile", "--url", served.url, "--model", served.model, "--tokenizer", str(plan.tokenizer),
        "--endpoint-type", "chat", "--streaming", "--use-server-token-count",
        "--request-rate", f"{plan.rate:.4g}", "--arrival-pattern", "poisson",
        "--request-count", str(plan.num_requests), "--num-dataset-entries", str(plan.num_requests),
        "--isl", str(plan.prompt_tokens or LEAST_WORDS), "--osl", str(OUTPUT_TOKENS),
        "--extra-inputs", "ignore_eos:true",
        "--image-batch-size", str(int(plan.has_pictures)),
        "--image-width-mean", str(SIZE[0]), "--image-height-mean", str(SIZE[1]), "--image-format", "png",
        "--workers-max", "1", "--record-processors", "1", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
        "--output-artifact-dir", str(folder),
    ]  # fmt: skip
    online = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    outside.run(command, folder / "aiperf.log", online)
    return read(json.loads((folder / "profile_export_aiperf.json").read_text()))


def read(report: dict[str, Any]) -> Seen:
    """Its figures, in our units."""
    return Seen(
        figures={name: _figure(report[theirs], times) for name, (theirs, times) in NAMES.items()},
        num_answered=int(report["request_count"]["avg"]),
        num_failed=int(report.get("error_request_count", {"avg": 0})["avg"]),
        num_tokens=report["total_output_tokens"]["avg"],
    )


def _figure(own: dict[str, Any], times: float) -> Figure:
    return Figure(
        mean=own["avg"] * times, p50=own["p50"] * times, p99=own["p99"] * times,
        lowest=own["min"] * times, highest=own["max"] * times,
    )  # fmt: skip
