"""What every measured runtime answers: one JSON question a line in, one JSON answer a line out.

    {"do": "load"}
        → seconds, weights_bytes, settings, versions
    {"do": "prefill", "tokens": 512, "seed": 1}
        → tokens_per_s, until the first answer token is known; cpu_s, processor time the question took
    {"do": "decode", "sequences": 8, "prompt": 128, "new": 96, "seed": 1}
        → tokens_per_s of all sequences together, prompts not counted; cpu_s, prompts counted
    {"do": "answer", "token_ids": [...], "new": 24}
        → token_ids, chosen greedily
    {"do": "memory"}
        → peak_bytes of this process since its start

Only numpy and the standard library: it runs inside the rivals' environments too. All runtimes get the same prompts, use
two threads, choose greedily and never stop early.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MODELS = Path(os.environ.get("TRIPTYCH_BENCH_MODELS", Path(__file__).parents[1] / ".rivals" / "models"))
NUM_THREADS = 2
NUM_SEQUENCES = 16  # at most, at once
SEQUENCE_TOKENS = 640  # room for one sequence, prompt and answer


class Runtime(Protocol):
    """One loaded model. The two figures are tokens a second."""

    weights: Path
    settings: dict[str, Any]
    versions: dict[str, str]

    def prefill(self, prompt: list[int]) -> float: ...

    def decode(self, prompts: list[list[int]], new: int) -> float: ...

    def answer(self, prompt: list[int], new: int) -> list[int]: ...


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Random words of the vocabulary, none of them special."""
    return [int(token) for token in np.random.default_rng(seed).integers(100, 49_000, num_tokens)]


def serve(load: Callable[[], Runtime]) -> None:
    """Answer until the questions end. A failure is an answer too: {"error": …}."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the runtime prints goes to the log
    runtime: Runtime | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "load":
                started = time.perf_counter()
                runtime = load()
                answer = _introduce(runtime, time.perf_counter() - started)
            elif question["do"] == "memory":
                answer = {"peak_bytes": peak_bytes()}
            else:
                assert runtime is not None, "ask it to load first"
                answer = _measure(runtime, question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _introduce(runtime: Runtime, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "weights_bytes": weights_bytes(runtime.weights),
        "settings": runtime.settings,
        "versions": runtime.versions,
    }


def _measure(runtime: Runtime, question: dict[str, Any]) -> dict[str, Any]:
    started = time.process_time()
    if question["do"] == "prefill":
        speed = runtime.prefill(prompt(question["tokens"], question["seed"]))
        return {"tokens_per_s": speed, "cpu_s": time.process_time() - started}
    if question["do"] == "decode":
        seeds = range(question["seed"], question["seed"] + question["sequences"])
        speed = runtime.decode([prompt(question["prompt"], seed) for seed in seeds], question["new"])
        return {"tokens_per_s": speed, "cpu_s": time.process_time() - started}
    if question["do"] == "answer":
        return {"token_ids": runtime.answer(question["token_ids"], question["new"])}
    raise ValueError(f"unknown question {question['do']!r}")


def weights_bytes(path: Path) -> int:
    """Of a file, or of the files in a folder that are large enough to hold weights."""
    if path.is_file():
        return path.stat().st_size
    return sum(
        file.stat().st_size for file in path.iterdir() if file.suffix in {".bin", ".data", ".npy", ".safetensors"}
    )


def peak_bytes() -> int:
    """The largest resident size this process ever had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
