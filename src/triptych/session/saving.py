"""Measure what is saved: baseline and ours on the same traffic and questions, each in a fresh process."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from triptych.compile.assemble import compile_checkpoint
from triptych.compile.config import CompileConfig, fingerprint
from triptych.compile.mini import assemble
from triptych.compress.samples import Conversation, read
from triptych.core.bundle import MANIFEST, Bundle, Manifest, open_bundle, write_bundle
from triptych.core.policy import Reduction
from triptych.core.progress import Progress, silent
from triptych.core.request import Sampling
from triptych.core.spec import Fact
from triptych.core.workload import Workload
from triptych.engine.config import EngineConfig
from triptych.errors import BackendError, ConfigError, MeasurementError, TriptychError
from triptych.plan.saving import FACTORS, Cost, Run, Saving, kept_of, plan_runs, run_of, saving_of
from triptych.session.opening import CACHE, Source
from triptych.session.session import Session
from triptych.session.traffic import serve

ANSWER_TOKENS = 32  # of an answer that is judged
BETWEEN = 10  # ways between two pairs of baseline and ours, so that a slow minute falls on all
OWN_PARTS = {
    "vision weights": ("vision",),
    "projector weights": ("projector",),
    "decoder weights": ("decoder", "embedding"),
}
PLAIN_WAY = (
    "The baseline: weights, keys and values in bf16, every visual token, the encoder open from the start but run "
    "for pictures alone, one answer at a time, nothing cached; in this same engine.",
    "Core-seconds: of the process and its children, from the first request to the last answer. GB: resident meanwhile, "
    "at most. Opening the model and warming up are left out of both.",
)

Turn = tuple[tuple[str, ...], int]  # the factors that are on, and how often they had their turn before


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingConfig:
    """What ours does beside its weights. rounds: how often the factors are measured; the ends oftener.

    kept: a file of runs that were measured before and are not measured again; each new one is added to it.
    """

    workload: Workload
    reduction: Reduction = Reduction()
    kv_cache_dtype: Literal["bf16", "u8", "u4"] = "u8"
    max_num_seqs: int = 16
    num_threads: int | None = None
    rounds: int = 1
    kept: Path | None = None
    cache: Path = field(default=CACHE)


class Way(Fact, frozen=True, kw_only=True):
    """One way of serving, as a process of its own is told it."""

    bundle: str
    opens_vision: bool
    reduction: Reduction
    kv_cache_dtype: Literal["bf16", "u8", "u4"]
    max_num_seqs: int
    caches: bool
    num_threads: int | None
    weights_digest: str  # of the bundle: one that was compiled anew is measured anew

    def open(self) -> Session:
        config = EngineConfig(
            kv_cache_dtype=self.kv_cache_dtype,
            max_num_seqs=self.max_num_seqs,
            reduction=self.reduction,
            enable_prefix_caching=self.caches,
            encoder_cache_bytes=None if self.caches else 0,
            num_threads=self.num_threads,
            max_queue_s=3_600.0,  # the baseline is late, and says so by its percentiles
        )
        session = Session.open(Source(model=self.bundle), config=config)
        if self.opens_vision:
            session.placements(open_all=True)
        return session


class Errand(Fact, frozen=True, kw_only=True):
    """What a process is to do: answer the workload and tell the `Run`, or the questions and tell which are right."""

    way: Way
    on: tuple[str, ...]
    turn: int = 0  # how many of its kind came before
    workload: Workload | None = None
    questions: str | None = None  # a samples.jsonl


def measure_saving(ours: Bundle, plain: Bundle, config: SavingConfig, progress: Progress = silent) -> Saving:
    """Both bundles are of one model, `plain` in bf16. Minutes; keep the machine quiet.

    Raises ConfigError where the two do not compare, MeasurementError for runs that cannot be trusted, and BackendError
    with the reason when a process ends early.
    """
    factors = factors_of(ours, plain, config)
    runs = run_ways(ours, plain, config, list(schedule(factors, config.rounds)), progress)
    before, now, saved, effects = saving_of(runs, factors)
    judged = None if config.workload.samples is None else judge(ours, plain, config, progress)
    return Saving(
        name=ours.manifest.name,
        workload=config.workload,
        about=(*PLAIN_WAY, _ours(ours, config), _noise(before, now)),
        baseline=before,
        ours=now,
        saved=saved,
        effects=effects,
        num_questions=0 if judged is None else len(judged[0]),
        right=(0, 0) if judged is None else (sum(judged[0]), sum(judged[1])),
        kept=None if judged is None else kept_of(*judged),
        runs=tuple(runs),
    )


def run_ways(
    ours: Bundle, plain: Bundle, config: SavingConfig, turns: Sequence[Turn], progress: Progress = silent
) -> list[Run]:
    """The same traffic, one way after another."""
    traffic = msgspec.structs.replace(config.workload, samples=None)
    runs = []
    for place, (on, turn) in enumerate(turns):
        progress("the same traffic, one way after another", place / len(turns))
        errand = Errand(way=way_of(on, ours, plain, config), on=on, turn=turn, workload=traffic)
        runs.append(msgspec.json.decode(_had(errand, config.kept), type=Run))
    progress("the same traffic, one way after another", 1.0)
    return runs


def judge(
    ours: Bundle, plain: Bundle, config: SavingConfig, progress: Progress = silent
) -> tuple[list[bool], list[bool]]:
    """Which of the workload's questions the baseline answers rightly, and which ours."""
    found = []
    for place, on in enumerate(((), factors_of(ours, plain, config))):
        progress("questions with known answers", place / 2)
        errand = Errand(way=way_of(on, ours, plain, config), on=on, questions=config.workload.samples)
        found.append(msgspec.json.decode(_had(errand, config.kept), type=list[bool]))
    progress("questions with known answers", 1.0)
    return found[0], found[1]


def plain_bundle(model: str | Path, progress: Progress = silent, *, cache: Path = CACHE) -> Bundle:
    """The baseline's weights: a bundle as it is, or a checkpoint (or `demo`) compiled in bf16, once, into `cache`."""
    folder = assemble(cache) if model == "demo" else Path(model)
    if (folder / MANIFEST).is_file():
        return open_bundle(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is neither a bundle nor a checkpoint", hint="name one of the two")
    config = CompileConfig(weights="bf16", parts={"embedding": "bf16"})
    target = cache / "bundles" / f"{folder.name}-plain-{fingerprint(folder, config)[:16]}"
    if (target / MANIFEST).is_file():
        return open_bundle(target)
    return compile_checkpoint(folder, target, config, progress)


def factors_of(ours: Bundle, plain: Bundle, config: SavingConfig) -> tuple[str, ...]:
    """Those in which the two differ. Raises ConfigError where they are not one model, or alike."""
    if ours.manifest.spec != plain.manifest.spec:
        raise ConfigError(
            f"{ours.path} and {plain.path} are of different models: their shapes differ",
            hint="compile the same checkpoint with `--weights bf16` for the baseline",
        )
    if ours.manifest.weights_digest == plain.manifest.weights_digest:
        raise ConfigError(f"{ours.path} holds the baseline's own weights", hint="compress it, or compile it in int8")
    sees = ours.manifest.spec.vision is not None
    differs = {
        "text-only": sees,
        "visual tokens": sees and not config.reduction.is_whole,
        "KV cache": config.kv_cache_dtype != "bf16",
        "batching": config.max_num_seqs > 1,
        "caches": True,
    }
    for name, parts in OWN_PARTS.items():
        differs[name] = any(_digests(ours, part) != _digests(plain, part) for part in parts)
    return tuple(name for name in FACTORS if differs[name])


def schedule(factors: Sequence[str], rounds: int) -> Iterator[Turn]:
    """Each way with how often it had its turn: baseline and ours come again after every `BETWEEN` others."""
    plain, ours, *others = plan_runs(factors)
    turns: dict[tuple[str, ...], int] = {}
    for number in range(rounds):
        for place, way in enumerate(others):
            again = (plain, ours) if place % BETWEEN == 0 else ()
            for each in (*(again if number % 2 else reversed(again)), way):
                yield each, turns.setdefault(each, 0)
                turns[each] += 1


def way_of(on: Sequence[str], ours: Bundle, plain: Bundle, config: SavingConfig) -> Way:
    """How the factors that are `on` are served, the others as a plain pipeline does it."""
    taken = frozenset(part for name in on for part in OWN_PARTS.get(name, ()))
    bundle = mixed(plain, ours, taken, config.cache)
    return Way(
        bundle=str(bundle.path),
        opens_vision="text-only" not in on and ours.manifest.spec.vision is not None,
        reduction=config.reduction if "visual tokens" in on else Reduction(),
        kv_cache_dtype=config.kv_cache_dtype if "KV cache" in on else "bf16",
        max_num_seqs=config.max_num_seqs if "batching" in on else 1,
        caches="caches" in on,
        num_threads=config.num_threads,
        weights_digest=bundle.manifest.weights_digest,
    )


def mixed(plain: Bundle, ours: Bundle, taken: frozenset[str], cache: Path) -> Bundle:
    """`plain` with the parts named taken from `ours`, as links. Its costs are right; its answers are not meant to be.

    A calibrated part may count on its neighbours' changes, so only the two ends are asked questions.
    """
    names = {part.name for part in ours.manifest.parts}
    if not taken or names <= taken:
        return ours if taken else plain
    key = "-".join((plain.manifest.weights_digest[:12], ours.manifest.weights_digest[:12], *sorted(taken)))
    target = cache / "mixed" / key
    if (target / MANIFEST).is_file():
        return open_bundle(target)

    def fill(folder: Path) -> Manifest:
        gone = {path for part in plain.manifest.parts if part.name in taken for path in part.files}
        new = [part for part in ours.manifest.parts if part.name in taken]
        files = {file: plain for file in plain.manifest.files if file.path not in gone}
        files |= {file: ours for file in ours.manifest.files if any(file.path in part.files for part in new)}
        for file, source in files.items():
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(source.file(file.path).absolute(), folder / file.path)
        by_name = {part.name: part for part in (*plain.manifest.parts, *new)}
        digest = hashlib.sha256(key.encode()).hexdigest()
        parts = tuple(by_name.values())
        return msgspec.structs.replace(plain.manifest, parts=parts, files=tuple(files), weights_digest=digest)

    return write_bundle(target, fill)


def _digests(bundle: Bundle, name: str) -> set[str]:
    part = bundle.manifest.part(name)
    return {file.sha256 for file in bundle.manifest.files if part is not None and file.path in part.files}


def _noise(*costs: Cost) -> str:
    most = max(cost.cost.highest / cost.cost.lowest - 1 for cost in costs)
    return f"Runs of baseline, or of ours, differ by up to {most:.0%}: a factor of less than that is noise."


def _ours(ours: Bundle, config: SavingConfig) -> str:
    weights = ", ".join(f"{part.name} {part.precision}" for part in ours.manifest.parts)
    tokens = "every visual token" if config.reduction.is_whole else f"{config.reduction.keep:.0%} of the visual tokens"
    return f"Ours: {weights}; {tokens}; keys and values in {config.kv_cache_dtype}; {config.max_num_seqs} at once."


# ── a process each ─────────────────────────────────────────────────────────────────────────────────────────────────


def _had(errand: Errand, kept: Path | None) -> bytes:
    """What the errand told, now or before."""
    key = hashlib.sha256(msgspec.json.encode(errand)).hexdigest()
    lines = kept.read_bytes().splitlines() if kept is not None and kept.is_file() else []
    for line in lines:
        if line.startswith(key.encode()):
            return line.partition(b" ")[2]
    told = run_errand(errand)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with kept.open("ab") as file:
            file.write(key.encode() + b" " + told + b"\n")
    return told


def run_errand(errand: Errand) -> bytes:
    """In a process of its own: its memory is nobody else's. Raises MeasurementError or BackendError, its last words."""
    command = [sys.executable, "-m", "triptych.session.saving"]
    done = subprocess.run(command, input=msgspec.json.encode(errand), capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        kind = MeasurementError if done.returncode == MeasurementError.exit_code else BackendError
        raise kind(f"serving {' + '.join(errand.on) or 'plainly'} ended with {done.returncode}: {said[-1]}")
    return done.stdout.splitlines()[-1]


def _do(errand: Errand) -> bytes:
    with errand.way.open() as session:
        if errand.workload is not None:
            return msgspec.json.encode(run_of(errand.on, serve(session, errand.workload)))
        return msgspec.json.encode(answer(session, read(Path(errand.questions or ""))))


def answer(session: Session, questions: Sequence[Conversation]) -> list[bool]:
    """Which are answered rightly: greedily, all at once as far as there are seats. Raises ConfigError."""
    unjudged = next((one.name for one in questions if one.right is None), None)
    if unjudged is not None:
        raise ConfigError(
            f"question {unjudged} does not say what is right",
            hint='"right": a regular expression, found in a right answer whatever its case',
        )
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0)
    streams = [
        session.start(session.prepare_chat(one.chat), sampling, request_id=f"question-{place}")
        for place, one in enumerate(questions)
    ]
    return [
        re.search(one.right or "", stream.answer().text, re.IGNORECASE | re.DOTALL) is not None
        for one, stream in zip(questions, streams, strict=True)
    ]


if __name__ == "__main__":
    try:
        sys.stdout.buffer.write(_do(msgspec.json.decode(sys.stdin.buffer.read(), type=Errand)) + b"\n")
    except TriptychError as told:
        print(told.message, file=sys.stderr)
        sys.exit(told.exit_code)
