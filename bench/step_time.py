"""Where an engine step's time goes: the model, or our own Python; and inside the model, which operations.

usage: python bench/step_time.py BUNDLE|demo [--batch 1 --batch 16] [--new 64] [--operators] [--json OUT]

Wraps the calls a step is made of with a clock. `outside` is what no wrapped call explains: waking the
engine's thread, and what other threads (the readers of the streams) took from it. `--operators` has OpenVINO count each
operation, which makes the model itself slower: read shares there, not milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parent / "rivals"))
import worker
from ours import Ours


class Clock:
    """Seconds and calls of each wrapped function, and what is inside what is taken out of the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner: list[float] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return plain(*given, **named)
            finally:
                taken = time.perf_counter() - started
                own = taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken
                self.seconds[label] += own
                self.calls[label] += 1

        setattr(owner, name, timed)


class Request:
    """OpenVINO's request, with its `infer` timed; everything else goes through."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self.operators: Counter[str] = Counter()
        self.counts = False

    def infer(self, **options: Any) -> None:
        self._plain.infer(**options)
        if self.counts:
            for entry in self._plain.profiling_info:
                self.operators[f"{entry.node_type} · {entry.exec_type}"] += entry.real_time.total_seconds()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def instrument(ours: Ours) -> tuple[Clock, Request]:
    from triptych.engine import loop

    clock = Clock()
    engine = ours._session._engine
    decoder = engine.runner._decoder
    inner = getattr(decoder, "_decoder", decoder)  # inside of Steady
    request = inner._request = Request(inner._request)
    clock.wrap(engine, "step", "loop: outside the parts below")
    clock.wrap(engine._scheduler, "schedule", "scheduler.schedule")
    clock.wrap(engine._scheduler, "commit", "scheduler.commit")
    clock.wrap(engine.runner, "decode", "runner.decode: due, clock")
    clock.wrap(engine.runner, "_arrays", "runner: block tables and positions")
    clock.wrap(engine.runner, "_embed", "runner: token embeddings")
    clock.wrap(engine.runner, "_decoder", "decoder: tensors in, logits out")
    clock.wrap(request, "infer", "OpenVINO infer")
    clock.wrap(loop, "sample", "sampler")
    clock.wrap(engine, "_append", "commit: tokens to streams")
    return clock, request


def show(batch: int, clock: Clock, wall_s: float, num_tokens: int, console: Console) -> list[record.Measure]:
    steps = max(clock.calls["OpenVINO infer"], 1)
    inside = sum(clock.seconds.values())
    rows = [*clock.seconds.most_common(), ("outside: thread hand-over, other threads", wall_s - inside)]
    table = Table(title=f"{batch} sequences: {num_tokens / wall_s:,.0f} tokens/s, {steps} steps")
    for column in ("", "µs a step", "share"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in rows:
        table.add_row(name, f"{1e6 * seconds / steps:,.0f}", f"{seconds / wall_s:.1%}")
    console.print(table)
    return [record.measure(name, f"{batch} sequences", "µs a step", [1e6 * seconds / steps]) for name, seconds in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", default="demo")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--json", type=Path)
    asked, console = parser.parse_args(), Console()
    if asked.operators:
        from triptych.backends import ov

        ov._core().set_property("CPU", {"PERF_COUNT": True})
    ours = Ours(asked.bundle)
    clock, request = instrument(ours)
    found: list[record.Measure] = []
    for batch in asked.batch or (1, 8, 16):
        prompts = [worker.prompt(worker_prompt, seed) for seed, worker_prompt in enumerate([8] * batch)]
        ours.decode(prompts, 8)
        clock.seconds.clear(), clock.calls.clear(), request.operators.clear()
        request.counts = asked.operators
        started = time.perf_counter()
        ours.decode(prompts, asked.new)
        found += show(batch, clock, time.perf_counter() - started, batch * (asked.new + 1), console)
        if asked.operators:
            total = sum(request.operators.values())
            for name, seconds in request.operators.most_common(8):
                console.print(f"    {seconds / total:6.1%}  {name}", highlight=False)
    if asked.json:
        record.write(asked.json, record.record("step_time", found, settings={"new_tokens": asked.new}))


if __name__ == "__main__":
    main()
