"""A checkpoint in, a compressed checkpoint out: compile in fp32, calibrate, compress, measure, write."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from triptych.compile.assemble import compile_checkpoint
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.config import CompileConfig, fingerprint
from triptych.compile.families import family_of
from triptych.compress import samples as calibration
from triptych.compress.check import Asked, check_folder, wanted
from triptych.compress.kv import measure_kv
from triptych.compress.loss import Judge, measure, unmet
from triptych.compress.mixed import weights_of, within
from triptych.compress.model import Changed, Model
from triptych.compress.recipe import Recipe, Resolved, load, resolve
from triptych.compress.run import Job, calibrates, compress, resolved
from triptych.compress.samples import Sample
from triptych.compress.write import Beside, Source, write_checkpoint
from triptych.core.bundle import COMPRESSION, MANIFEST, Bundle, Compression, Evidence, Step, check_target, open_bundle
from triptych.core.progress import Progress
from triptych.core.quantized import Held, Quantized, digest, num_bits, plain
from triptych.core.queries import FILE, Queries
from triptych.errors import BundleError, ConfigError
from triptych.session.calibration import own_words, prepare
from triptych.session.opening import CACHE

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HEADS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressConfig:
    """What was asked. samples: a `samples.jsonl`, None: the built-in set. budget_bytes: of all weights together."""

    recipe: str = "modality"
    samples: Path | None = None
    budget_bytes: int | None = None
    max_kld: float | None = None
    cache: Path = CACHE


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """What became of a part: `became` in words; bytes of its weights; its evidence, alone compressed."""

    part: str
    became: str
    bits: float  # a weight, scales included
    bytes_before: int
    bytes_after: int
    evidence: Evidence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `compress` did and what it cost."""

    path: Path
    parts: tuple[PartReport, ...]
    whole: Evidence
    remarks: tuple[str, ...] = field(default=())


def compress_checkpoint(source: Path, target: Path, config: CompressConfig, progress: Progress) -> Report:
    """Write `source` compressed at `target`, in one step and only when its gate is met.

    Raises ConfigError, CheckpointError, BundleError, and GateError when the answers differ more than was allowed.
    What is finished lies in a folder beside `target` until all is, so that an interrupted run goes on.
    """
    began = time.monotonic()
    recipe = load(config.recipe)
    check_target(target, COMPRESSION, "compressed checkpoint")
    bundle = in_fp32(source, config.cache, progress)
    used, held_out = _samples(bundle, config, recipe, progress)
    model = Model.open(bundle)
    place = Place(source, bundle, model)
    if config.budget_bytes is not None:
        recipe = within(recipe, place.shapes, config.budget_bytes - place.small_bytes)
    job = Job(
        model=model,
        recipe=recipe,
        shapes=place.shapes,
        samples=used,
        kind=place.kind(recipe),
        small_kinds=place.small_kinds(),
        work=target.absolute().parent / f".{target.name}.work",
        seed=bundle.manifest.weights_digest,
        progress=progress,
    )
    blind = _unmet(job, place, config, held_out)
    made = compress(job)
    changed: Changed = {part: {**place.narrowed.get(part, {}), **own} for part, own in made.changed.items()}
    progress("loss", 0.0)
    evidence = measure(Judge(model, held_out), changed, fed=_fed(config, used, held_out), max_kld=config.max_kld)
    progress("loss", 1.0)
    model.use({})
    policy, queries = measure_kv(model, used, bundle.manifest.spec.decoder, progress)
    step = place.step(changed, {"seconds": time.monotonic() - began, "samples": float(len(used))})
    told = Compression(recipe=_told(recipe), step=step, evidence=evidence, kv_policy=policy)
    beside = Beside(compression=told, files={FILE: _bytes(queries)})
    place.write(target, changed, beside, wanted(resolved(job), place.names, made.factors))
    shutil.rmtree(job.work, ignore_errors=True)
    return Report(path=target, parts=place.reports(changed, evidence), whole=evidence[0], remarks=blind + made.remarks)


def _samples(
    bundle: Bundle, config: CompressConfig, recipe: Recipe, progress: Progress
) -> tuple[list[Sample], list[Sample]]:
    """To calibrate on, and held out to measure with. The model's own words join the built-in ones where needed."""
    sees = bundle.manifest.spec.vision is not None
    given = calibration.builtin(sees=sees) if config.samples is None else calibration.read(config.samples)
    used, held_out = calibration.split(prepare(bundle, given, progress, cache=config.cache))
    if config.samples is None and any(calibrates(step) for step in recipe.steps if step.part == "decoder"):
        used = [*used, *own_words(bundle, progress, cache=config.cache)]
    return used, held_out


class Place:
    """Where a checkpoint keeps what a recipe may change: own names by part, the head and the token table apart.

    narrowed: norms and biases of a decoder in f32 which are exact in the type of its matrices, fp16 or else bf16, in
    that type, so that it is the model's. A tied head that is stored once more is left out, or it would stay exact and
    no longer be tied.
    """

    def __init__(self, source: Path, bundle: Bundle, model: Model) -> None:
        self._checkpoint = Checkpoint.open(source)
        layout = family_of(self._checkpoint).layout(self._checkpoint, bundle.manifest.spec)
        names, heads = layout.parts, {name for name in layout.unused if name.endswith(HEADS[1])}
        self._tensors = {name: read for name, read in self._checkpoint.tensors.items() if name not in heads}
        self._seed = bundle.manifest.weights_digest
        self.names: dict[str, dict[str, str]] = {}
        for part in model.parts:
            graph = model.parts[part].weights
            own = {name: at for name, at in names[part].items() if name.removesuffix(".weight") in graph}
            self.names[part] = {name: at for name, at in own.items() if name not in HEADS and not _is_spoken(name)}
        self.names["embedding"] = {name: names["decoder"][name] for name in HEADS if name in names["decoder"]}
        self._held = {
            part: {name: self._checkpoint.held(at) for name, at in own.items()} for part, own in self.names.items()
        }
        self.shapes = {
            part: {name: tuple(held.shape) for name, held in own.items()} for part, own in self._held.items()
        }
        small = {name: held for name, held in self._held["decoder"].items() if len(held.shape) < 2}
        types = {held.dtype for held in self._held["decoder"].values() if not isinstance(held, Quantized)}
        narrow = np.dtype("float16" if np.dtype("float16") in types else "bfloat16")
        self.narrowed: Changed = {"decoder": {name: plain(held).astype(narrow) for name, held in small.items()}}
        if not all(_is_exact(held, narrow) for held in small.values()):
            self.narrowed = {}

    @property
    def small_bytes(self) -> int:
        """Of norms and biases, which no recipe changes."""
        own = ((part, name, held) for part, found in self._held.items() for name, held in found.items())
        kept = (self.narrowed.get(part, {}).get(name, held) for part, name, held in own if len(held.shape) < 2)
        return sum(num_bits(held) for held in kept) // 8

    def kind(self, recipe: Recipe) -> str:
        """The type of most plain numbers once the recipe is done: scales must be in it too."""
        sizes: Counter[str] = Counter()
        for found in resolve(recipe, {part: weights_of(own) for part, own in self.shapes.items()}):
            if found.step.is_kept:
                shapes = self.shapes[found.step.part]
                sizes[found.step.keep] += sum(prod(shapes[f"{name}.weight"]) for name in found.names)
        for part, own in self._held.items():
            for name, held in own.items():
                if len(held.shape) < 2 and part in ("decoder", "embedding"):
                    dtype = self.narrowed.get(part, {}).get(name, held)
                    sizes[TYPES.get(str(plain(dtype).dtype), "fp32")] += prod(held.shape)
        return sizes.most_common(1)[0][0]

    def small_kinds(self) -> dict[str, str]:
        """The type of each part's norms and biases."""
        found: dict[str, Counter[str]] = {part: Counter() for part in self._held}
        for part, own in self._held.items():
            for name, held in own.items():
                dtype = str(plain(self.narrowed.get(part, {}).get(name, held)).dtype)
                found[part][TYPES.get(dtype, "fp32")] += prod(held.shape) if len(held.shape) < 2 else 0
        return {part: count.most_common(1)[0][0] if count else "fp32" for part, count in found.items()}

    def changes(self, found: Resolved) -> bool:
        """Whether a step leaves its weights other numbers than the checkpoint has."""
        if not found.step.is_kept:
            return True
        held = (self._held[found.step.part][f"{name}.weight"] for name in found.names)
        return found.step.keep != "fp32" and any(TYPES.get(str(plain(own).dtype)) != found.step.keep for own in held)

    def step(self, changed: Changed, metrics: dict[str, float]) -> Step:
        """The history's entry; the outputs' digest covers every number that was changed."""
        found = hashlib.sha256()
        for part, own in sorted(changed.items()):
            for name, held in sorted(own.items()):
                found.update(f"{part} {name} {digest(held)}".encode())
        return Step(
            stage="compress",
            version=version("triptych"),
            inputs_digest=self._seed,
            outputs_digest=found.hexdigest(),
            metrics=metrics,
        )

    def write(self, target: Path, changed: Changed, beside: Beside, asked: Asked) -> None:
        """Into its place only when it reads back as it was made and as the recipe asked. Raises GateError."""
        source = Source(folder=self._checkpoint.folder, config=self._checkpoint.config, tensors=self._tensors)
        named = {part: {self.names[part][name]: held for name, held in own.items()} for part, own in changed.items()}
        check = partial(check_folder, source=source, changes=named, asked=asked)
        write_checkpoint(source, target, named, beside, check=check)

    def reports(self, changed: Changed, evidence: Sequence[Evidence]) -> tuple[PartReport, ...]:
        found = {one.subject: one for one in evidence}
        return tuple(self._report(part, changed.get(part, {}), found.get(part)) for part in self.names)

    def _report(self, part: str, own: Mapping[str, Held], evidence: Evidence | None) -> PartReport:
        after = self._held[part] | dict(own)
        weights = [held for held in after.values() if len(held.shape) > 1]
        bits = sum(num_bits(held) for held in weights) / sum(prod(held.shape) for held in weights)
        return PartReport(
            part=part,
            became=_became(weights),
            bits=bits,
            bytes_before=sum(num_bits(held) for held in self._held[part].values()) // 8,
            bytes_after=sum(num_bits(held) for held in after.values()) // 8,
            evidence=evidence,
        )


def in_fp32(source: Path, cache: Path, progress: Progress) -> Bundle:
    """The checkpoint compiled in fp32, kept in the cache for the next time."""
    config = CompileConfig(weights="fp32")
    target = cache / "bundles" / f"{source.name}-fp32-{fingerprint(source, config)[:16]}"
    if (target / MANIFEST).is_file():
        with contextlib.suppress(BundleError):  # cut short, or another version's
            return open_bundle(target)
    return compile_checkpoint(source, target, config, progress)


def _unmet(job: Job, place: Place, config: CompressConfig, held_out: Sequence[Sample]) -> tuple[str, ...]:
    """A remark where a tower changes and no sample shows what that costs. Raises ConfigError where a gate was asked."""
    parts = unmet(held_out, dict.fromkeys(found.step.part for found in resolved(job) if place.changes(found)))
    if not parts:
        return ()
    where = " and the ".join(parts)
    told = f"none of {len(held_out)} samples to measure on has a picture: what changes in the {where} is not measured"
    if config.max_kld is not None:
        raise ConfigError(
            f"{told}, and --max-kld would let it pass whatever it is",
            hint="add samples with `image_url` parts, or leave out --max-kld",
        )
    return (told,)


def _fed(config: CompressConfig, used: Sequence[Sample], held_out: Sequence[Sample]) -> str:
    name = "the built-in samples" if config.samples is None else config.samples.name
    met = {id(sample) for sample in used}
    both = [sample for sample in held_out if id(sample) in met]
    if not both:
        return f"held out from {name}"
    if len(both) == len(held_out):
        return f"of {name}, on which it was calibrated too: they are too few to hold some out"
    kind = "with" if both[0].has_media else "without"
    return f"held out from {name}; the {len(both)} {kind} pictures are too few for that, it was calibrated on them too"


def _became(weights: Sequence[Held]) -> str:
    """In words, what most numbers first."""
    sizes: Counter[str] = Counter()
    for held in weights:
        words = TYPES.get(str(held.dtype), str(held.dtype)) if not isinstance(held, Quantized) else _words(held)
        sizes[words] += prod(held.shape)
    return ", ".join(words for words, _ in sizes.most_common())


def _words(held: Quantized) -> str:
    grouped = f" in groups of {held.group_size}" if held.codes.shape[1] > 1 else ""
    return f"int{held.bits}{grouped}" + (", activations int8" if held.input_scale is not None else "")


def _is_exact(held: Held, kind: np.dtype[Any]) -> bool:
    """Whether `kind` would hold every number as it is."""
    values = np.asarray(plain(held), np.float32)
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(kind).astype(np.float32), values)


def _is_spoken(name: str) -> bool:
    """A row of the decoder's table that a projector says: not a tensor of the file."""
    return name.startswith("words.")


def _told(recipe: Recipe) -> str:
    return msgspec.json.encode(recipe).decode()


def _bytes(queries: Queries) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        queries.write(Path(folder) / FILE)
        return (Path(folder) / FILE).read_bytes()
