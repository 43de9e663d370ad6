"""GuideLLM as an outside client: its own load, its own clock, its own arithmetic; we read its report."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

from traffic.served import Served

# ours: (theirs, unit, what theirs are multiplied with)
NAMES = {
    "TTFT": ("time_to_first_token_ms", "s", 1e-3),
    "TPOT": ("time_per_output_token_ms", "s", 1e-3),
    "between tokens": ("inter_token_latency_ms", "s", 1e-3),
    "whole answer": ("request_latency", "s", 1.0),
    "answers": ("requests_per_second", "answers/s", 1.0),
    "tokens": ("output_tokens_per_second", "tokens/s", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """tokenizer: a folder. rate: requests a second."""

    tokenizer: Path
    rate: float
    seconds: float
    prompt_tokens: int = 128
    output_tokens: int = 32
    has_pictures: bool = False

    @property
    def subject(self) -> str:
        what = "pictures" if self.has_pictures else "text"
        return f"guidellm, {what}, {self.rate:.3g} requests/s"


def run(guidellm: Path, served: Served, plan: Plan, folder: Path) -> list[record.Measure]:
    """What GuideLLM found. Raises SystemExit when it failed."""
    folder.mkdir(parents=True, exist_ok=True)
    report, log = folder / "report.json", folder / "guidellm.log"
    report.unlink(missing_ok=True)
    length = f"output_tokens={plan.output_tokens}"
    data = f"kind=synthetic_text,prompt_tokens={plan.prompt_tokens},{length}"
    if plan.has_pictures:
        data = f"kind=synthetic_image,width=320,height=240,{length}"
    command = [
        str(guidellm), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={served.url},model={served.model},http2=false",
        "--profile", f"kind=poisson,rate={plan.rate:.4g}",
        "--constraint", f"kind=max_duration,seconds={plan.seconds:.0f}",
        "--tokenizer", f"kind=hf_auto,model={plan.tokenizer}",
        "--data", data,
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    with log.open("w") as file:
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING"}
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=offline, check=False)
    if done.returncode or not report.exists():
        raise SystemExit(f"guidellm ended with {done.returncode}, see {log}")
    return read(json.loads(report.read_text()), plan.subject)


def read(report: dict[str, Any], subject: str) -> list[record.Measure]:
    """Its percentiles over successful requests, in our units; and how many failed."""
    metrics = report["benchmarks"][0]["metrics"]
    found = []
    for name, (theirs, unit, times) in NAMES.items():
        own = metrics[theirs]["successful"]
        if unit == "s":
            for share, key in ((50, "p50"), (99, "p99")):
                found.append(_measure(f"{name} p{share}", subject, unit, own["percentiles"][key] * times, own, times))
        else:
            found.append(_measure(name, subject, unit, own["mean"] * times, own, times))
    totals = metrics["request_totals"]
    for name, key in (("answered", "successful"), ("failed", "errored")):
        found.append(record.measure(f"requests that {name}", subject, "", [totals[key]]))
    return found


def _measure(name: str, subject: str, unit: str, value: float, own: dict[str, Any], times: float) -> record.Measure:
    return record.Measure(
        name=name, subject=subject, unit=unit, value=value, lowest=own["min"] * times, highest=own["max"] * times,
        num_samples=own["count"],
    )  # fmt: skip
