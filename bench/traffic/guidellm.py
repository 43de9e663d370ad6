"""GuideLLM as an outside client: its own load, its own clock, its own arithmetic; we read its report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from traffic import outside
from traffic.outside import OUTPUT_TOKENS, SIZE, Figure, Plan, Seen
from traffic.served import Served

PACKAGES = ("torch==2.13.0", "guidellm[vision]")
# ours: (theirs, what theirs are multiplied with). What it calls TPOT has the first token in it
NAMES = {
    "TTFT": ("time_to_first_token_ms", 1e-3),
    "TPOT": ("inter_token_latency_ms", 1e-3),
    "whole answer": ("request_latency", 1.0),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING"}


def run(program: Path, served: Served, plan: Plan, folder: Path) -> Seen:
    """What GuideLLM saw. Raises SystemExit when it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    data = f"kind=synthetic_text,prompt_tokens={plan.prompt_tokens}"
    if plan.has_pictures:
        data = f"kind=synthetic_image,width={SIZE[0]},height={SIZE[1]},content=noise,format=png"
    command = [
        str(program), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={served.url},model={served.model},http2=false",
        "--profile", f"kind=poisson,rate={plan.rate:.4g}",
        "--constraint", f"kind=max_requests,count={plan.num_requests}",
        "--tokenizer", f"kind=hf_auto,model={plan.tokenizer}",
        "--data", f"{data},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    outside.run(command, folder / "guidellm.log", os.environ | OFFLINE)
    return read(json.loads(report.read_text()))


def read(report: dict[str, Any]) -> Seen:
    """Its figures of successful requests, in our units."""
    metrics = report["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    return Seen(
        figures={name: _figure(metrics[theirs]["successful"], times) for name, (theirs, times) in NAMES.items()},
        num_answered=totals["successful"],
        num_failed=totals["errored"] + totals["incomplete"],
        num_tokens=metrics["output_token_count"]["successful"]["total_sum"],
    )


def _figure(own: dict[str, Any], times: float) -> Figure:
    return Figure(
        mean=own["mean"] * times, p50=own["percentiles"]["p50"] * times, p99=own["percentiles"]["p99"] * times,
        lowest=own["min"] * times, highest=own["max"] * times,
    )  # fmt: skip
