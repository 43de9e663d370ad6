"""Take a recipe's steps one after another: scales between channels first, then weights in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import torch
from torch import Tensor

from triptych.compress import awq, balance, cost
from triptych.compress.calibrate import calibrate, gram_bytes
from triptych.compress.draw import draw
from triptych.compress.fold import Factors, Fold, fold, folds
from triptych.compress.gptq import gptq, made_good
from triptych.compress.kept import digest, keep, kept
from triptych.compress.mixed import Shapes, layer_of, weights_of, widths
from triptych.compress.model import TOWERS, Changed, Model
from triptych.compress.recipe import Recipe, RecipeStep, Resolved, resolve
from triptych.compress.rounding import Grid, ScaleType, round_weight
from triptych.compress.samples import Sample
from triptych.compress.smooth import smooth_scales
from triptych.compress.train import TOKENS, Course, train
from triptych.compress.turn import Met, take_turns
from triptych.core.progress import Progress, silent
from triptych.core.quantized import Held, Quantized, plain
from triptych.core.spec import Modality
from triptych.errors import ConfigError, TriptychError

CLIPS = 8  # fewer bits gain by clipping the range; with 8 the search costs minutes and moves the loss by nothing
SCALE_TOKENS, GRAM_TOKENS = 1 << 13, 1 << 15  # that scales and rounding look at, of however many; training takes all
GRAM_BYTES = 1 << 30  # of what is seen for scales, in memory at a time: a window of layers, at least one
OUTPUTS = ":outputs"  # of a weight, where what is felt is kept
KINDS: Mapping[str, tuple[torch.dtype, Any, ScaleType]] = {
    "bf16": (torch.bfloat16, ml_dtypes.bfloat16, "bfloat16"),
    "fp16": (torch.float16, np.float16, "float16"),
    "fp32": (torch.float32, np.float32, "float16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to compress, on what, and where unfinished work is kept.

    shapes: of each part of a recipe, the checkpoint's own shape of each tensor by own name (`X.weight`, `X.bias`);
    what is not named cannot be changed. kind: the type of the checkpoint's plain numbers, which scales must be in too;
    small_kinds: that of each part's norms and biases.
    """

    model: Model
    recipe: Recipe
    shapes: Shapes
    samples: Sequence[Sample]
    kind: str
    small_kinds: Mapping[str, str]
    work: Path
    seed: str  # digest of the checkpoint
    progress: Progress = silent
    gram_bytes: int = GRAM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """changed: what took a tensor's place, by part and own name. factors: what was folded into each part's tensors
    before. remarks: sentences on what could not be as asked.
    """

    changed: Changed
    factors: Mapping[str, Factors]
    remarks: tuple[str, ...]


def compress(job: Job) -> Made:
    """Every step of the recipe, in order; a later one is calibrated on what the earlier ones left.

    Raises ConfigError where the recipe does not fit the model, or its samples lack what it calibrates.
    """
    steps = resolved(job)
    for found in steps:
        _refuse_blind(found.step, job)
    changed: Changed = {}
    factors: dict[str, dict[str, list[Tensor]]] = {}
    remarks: list[str] = []
    grounds = (job.seed, job.kind, sorted(job.small_kinds.items()), digest(job.samples))
    for number, found in enumerate(steps, 1):
        job.model.use(changed)
        taken = _Step(job, found, f"{found.step.part}, step {number} of {len(steps)}", grounds)
        own = taken.take()
        if found.step.train_steps:
            own = taken.train(own, changed)
        changed[found.step.part] = changed.get(found.step.part, {}) | own
        factors.setdefault(found.step.part, {}).update(taken.factors)
        remarks += [*found.fallbacks, *taken.remarks]
    return Made(changed=changed, factors=factors, remarks=tuple(dict.fromkeys(remarks)))


def resolved(job: Job) -> tuple[Resolved, ...]:
    """The recipe's steps with the weights that they meet."""
    return resolve(job.recipe, {part: weights_of(own) for part, own in job.shapes.items()})


def calibrates(step: RecipeStep) -> bool:
    """Whether a step looks at samples."""
    few = any(bits < 8 for bits in step.all_bits)
    return few or step.scale != "none" or step.round != "nearest" or step.activations is not None


def _refuse_blind(step: RecipeStep, job: Job) -> None:
    """Weights for pictures that no picture has met would be rounded for nothing."""
    sees = "vision" in job.model.parts
    if not sees or any(len(sample.tiles) for sample in job.samples):
        return
    if (step.part in TOWERS and calibrates(step)) or step.scale == "mbq":
        why = "weighs modalities" if step.scale == "mbq" else "is calibrated on pictures"
        raise ConfigError(
            f"{step.part}: recipe {job.recipe.name} {why}, and none of the {len(job.samples)} samples has one",
            hint="add samples with `image_url` parts, or choose a recipe that does not calibrate this part",
        )


class _Step:
    """One step being taken: its part's tensors as they are scaled and rounded, and what was said on the way."""

    def __init__(self, job: Job, found: Resolved, label: str, grounds: tuple[object, ...]) -> None:
        self.remarks: list[str] = []
        self.factors: dict[str, list[Tensor]] = {}
        self._job = job
        self._found = found
        self._step = found.step
        self._graph = "decoder" if found.step.part == "embedding" else found.step.part
        self._label = label
        self._grounds = grounds  # what all that is made of the job depends on, beside the recipe
        self._tensors = dict(job.model.exact(found.step.part))
        self._felt = cost.RoundingCost(costs={}, units=())
        self._weights: dict[str, dict[Modality, float]] = {}  # of each block's end, a token's weight by modality

    def take(self) -> dict[str, Held]:
        """All of the step's tensors. The model has in place what earlier steps changed."""
        if self._step.is_kept:
            return {f"{name}.weight": self._plain(name) for name in self._found.names}
        if self._step.scale == "mbq":
            self._weights = self._sensed()
        small = self._scale() if self._step.scale != "none" else {}
        mine = {*self._found.names, *(full.removesuffix(".weight") for full in small)}
        scaled = {name: self._tensors[name] for name in mine}
        self._job.model.parts[self._graph].weights |= self._in_graph(scaled)
        if self._step.widths or self._step.round == "felt":
            self._felt = self._feel()
        done = self._turns(self._grids()) if calibrates(self._step) else {}
        for name in self._found.names:  # what needs no samples, or stands in no graph
            if f"{name}.weight" not in done:
                done[f"{name}.weight"] = self._rounded(
                    name, self._typed(self._found.grids[name][min(self._step.all_bits)]), None
                )
        self._job.progress(self._label, 1.0)
        return small | done

    def train(self, own: dict[str, Held], before: Changed) -> dict[str, Held]:
        """`own`, what was taken, with its scales and all the part's norms trained beside what was changed `before`."""
        job, part, label = self._job, self._step.part, f"{self._label}: training in {self._step.train_steps} steps"
        full = [name for name, shape in job.shapes[part].items() if len(shape) == 1 and name.endswith(".weight")]
        norms = {name: self._as_small(name, self._tensors[name.removesuffix(".weight")]) for name in full}
        held = norms | before.get(part, {}) | own
        taught = {name: held.pop(name) for name in dict.fromkeys((*full, *own)) if name.endswith(".weight")}

        def make() -> dict[str, Held]:
            job.progress(label, 0.0)
            course = Course(
                held=taught,
                beside=before | {part: held},
                steps=self._step.train_steps,
                path=self._path(label, self._found.names).with_suffix(".pt"),
                progress=partial(job.progress, label),
            )
            return train(job.model, self._some(self._step.train_steps * TOKENS), course)

        return own | self._finished(f"{label}, done", self._found.names, make)

    def _in_graph(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        held = self._job.model.parts[self._graph].weights
        return {name: tensor for name, tensor in tensors.items() if name in held}

    def _finished(self, what: str, names: Sequence[str], make: Callable[[], dict[str, Held]]) -> dict[str, Held]:
        """What an interrupted run has left, or made now and kept."""
        path = self._path(what, names)
        if not path.is_file():
            keep(make(), path)
        return kept(path)

    def _path(self, what: str, names: Sequence[str]) -> Path:
        """Where a result lies: its name tells all that it depends on."""
        own = msgspec.structs.replace(self._step, train_steps=0)  # `what` tells these
        recipe = [msgspec.json.encode(own if s is self._step else s).decode() for s in self._job.recipe.steps]
        facts = (self._grounds, recipe, self._label, what, names)
        return self._job.work / f"{hashlib.sha256(msgspec.json.encode(facts)).hexdigest()}.safetensors"

    def _some(self, num_tokens: int) -> list[Sample]:
        """Of the job's samples; those with pictures alone where these are all that the part sees."""
        samples = self._job.samples
        if self._graph in TOWERS:
            samples = [sample for sample in samples if len(sample.tiles)]
        return draw(samples, num_tokens)

    # ── scales that move between channels ──────────────────────────────────────────────────────────────────────

    def _scale(self) -> dict[str, Held]:
        """Fold the scales into the tensors; gives the norms and biases that changed."""
        pairs = folds(self._found.names, self._tensors)
        if not pairs:
            self.remarks.append(f"{self._step.part}: nothing makes an input that {self._step.scale} could scale")
        windows = list(self._windows(pairs))
        kind = KINDS[self._job.small_kinds[self._step.part]][0]
        for place, window in enumerate(windows):
            self._job.progress(f"{self._label}: scales", place / len(windows))
            found = self._finished("scales", [pair.maker for pair in window], partial(self._search, window))
            for pair in window:
                scales = torch.from_numpy(np.array(plain(found[pair.maker])))
                for name, factor in fold(self._tensors, pair, scales, kind).items():
                    self.factors.setdefault(name, []).append(factor)
        small = {(name if name.endswith(".bias") else f"{name}.weight"): self._tensors[name] for name in self.factors}
        return {full: self._as_small(full, own) for full, own in small.items() if own.ndim == 1}

    def _windows(self, pairs: Sequence[Fold]) -> Iterator[list[Fold]]:
        """As many together as calibration has memory for, at least one."""
        window: list[Fold] = []
        size = 0
        for pair in pairs:
            own = gram_bytes({pair.readers[0]: self._tensors[pair.readers[0]]})
            if window and size + own > self._job.gram_bytes:
                yield window
                window, size = [], 0
            window.append(pair)
            size += own
        if window:
            yield window

    def _search(self, window: Sequence[Fold]) -> dict[str, Held]:
        """The scales of each maker in the window, as the model of full precision sees its inputs."""
        job, found = self._job, {}
        seen = calibrate(job.model, self._some(SCALE_TOKENS), self._graph, [pair.readers[0] for pair in window])
        for pair in window:
            readers, own = [self._tensors[name] for name in pair.readers], seen[pair.readers[0]]
            if self._step.scale == "smooth":
                most = torch.stack([reader.abs().amax(0) for reader in readers]).amax(0)
                scales = smooth_scales(own.range, most)
            else:
                weighed = awq.balanced(own.channels, self._weight_of(pair.readers[0]))
                grid = self._found.grids[pair.readers[0]][min(self._step.all_bits)]
                scales = awq.search(readers, weighed, grid).scales
            found[pair.maker] = scales.numpy()
        return found

    # ── rounding ───────────────────────────────────────────────────────────────────────────────────────────────

    def _grids(self) -> dict[str, Grid]:
        """Of each weight, at the one width there is, or at that chosen by what rounding is felt to cost."""
        names, grids = self._found.names, self._found.grids
        if not self._step.widths:
            return {name: self._typed(grids[name][self._step.all_bits[0]]) for name in names}

        chosen = widths(self._felt, {name: self._tensors[name].shape for name in names}, self._found)
        return {name: self._typed(grids[name][chosen[name]]) for name in names}

    def _feel(self) -> cost.RoundingCost:
        """What each weight's rounding at the least width costs, and how its outputs are felt; kept."""
        least = {name: grids[min(grids)] for name, grids in self._found.grids.items()}

        def find() -> dict[str, Held]:
            self._job.progress(f"{self._label}: what rounding costs", 0.0)
            is_felt = self._step.round == "felt"
            felt = cost.feel(self._job.model, self._job.samples, least, with_outputs=is_felt)
            costs = {name: np.array([felt.costs[name], at]) for at, unit in enumerate(felt.units) for name in unit}
            return costs | {f"{name}{OUTPUTS}": outputs.numpy() for name, outputs in felt.outputs.items()}

        found = {name: np.asarray(plain(held)) for name, held in self._finished("felt", tuple(least), find).items()}
        units: dict[float, list[str]] = {}
        for name in least:
            units.setdefault(float(found[name][1]), []).append(name)
        outputs = {name: torch.from_numpy(found[full]) for name in least if (full := f"{name}{OUTPUTS}") in found}
        costs = {name: float(found[name][0]) * (made_good(outputs[name]) if name in outputs else 1) for name in least}
        return cost.RoundingCost(costs=costs, units=tuple(map(tuple, units.values())), outputs=outputs)

    def _turns(self, grids: Mapping[str, Grid]) -> dict[str, Held]:
        """Every weight of the graph, layer by layer; finished layers are kept."""
        layers: dict[str, list[str]] = {}
        for name in self._in_graph(dict.fromkeys(grids)):
            layers.setdefault(layer_of(name), []).append(name)
        paths = {layer: self._path("rounded", own) for layer, own in layers.items()}
        done = {full: held for path in paths.values() if path.is_file() for full, held in kept(path).items()}

        def meet(name: str, met: Met) -> float | None:
            own = layers[layer_of(name)]
            if f"{name}.weight" not in done:
                done[f"{name}.weight"] = self._rounded(name, grids[name], met)
                done.update(self._shifted(name, done[f"{name}.weight"], met))
                if all(f"{each}.weight" in done for each in own):
                    keep(
                        {full: done[full] for each in own for full in _both(each) if full in done},
                        paths[layer_of(name)],
                    )
            self._job.progress(self._label, sum(full.endswith(".weight") for full in done) / len(grids))
            self._job.model.put(self._graph, {full: done[full] for full in _both(name) if full in done})
            del self._tensors[name]  # or a large model would lie in memory once more
            held = done[f"{name}.weight"]
            return held.input_scale if isinstance(held, Quantized) else None

        if not all(path.is_file() for path in paths.values()):
            samples = self._some(GRAM_TOKENS)
            take_turns(self._job.model, samples, self._graph, [name for own in layers.values() for name in own], meet)
        return done

    def _rounded(self, name: str, grid: Grid, met: Met | None) -> Quantized:
        weight = self._tensors[name].flatten(1)
        gram = None if met is None or self._tensors[name].ndim > 4 else met.gram(self._weight_of(name))
        try:
            if self._step.round != "nearest" and met is not None and gram is not None:
                inputs = met.factored(self._weight_of(name))
                found = gptq(weight, inputs, grid, self._felt.outputs.get(name))
            else:
                importance = None if gram is None else gram.diagonal()
                found = round_weight(weight, grid, importance=importance, clip=grid.bits < CLIPS)
        except TriptychError as error:
            raise type(error)(f"{self._step.part}: {name}: {error.message}", hint=error.hint) from error
        scale = None if met is None or self._step.activations is None else met.seen.step() or None
        return replace(found, shape=self._job.shapes[self._step.part][f"{name}.weight"], input_scale=scale)

    def _shifted(self, name: str, held: Held, met: Met) -> dict[str, Held]:
        """The bias, where there is one, gives back what rounding takes from the product on average."""
        if f"{name}.bias" not in self._tensors:
            return {}
        lost = _shift(self._tensors[name], held, met.seen.mean)
        return {f"{name}.bias": self._as_small(f"{name}.bias", self._tensors[f"{name}.bias"].flatten() + lost)}

    def _as_small(self, full: str, values: Tensor) -> Held:
        """A norm or a bias in its part's own type."""
        part = self._step.part
        values = values.reshape(self._job.shapes[part][full])
        return np.asarray(values.numpy().astype(KINDS[self._job.small_kinds[part]][1]))

    def _weight_of(self, name: str) -> Mapping[Modality, float]:
        return self._weights.get(balance.block_end(name), {})

    def _sensed(self) -> dict[str, dict[Modality, float]]:
        """How much a token of each modality weighs in each block: a backward pass over the samples where they meet."""
        model = self._job.model
        shown = cost.few([sample for sample in self._job.samples if sample.has_media])

        def logits(sample: Sample, judged: Any, hooks: Any) -> Tensor:
            with torch.no_grad():
                embeddings = model.embed(sample)
            return model.decode(embeddings, judged, {"decoder": hooks})

        self._job.progress(f"{self._label}: sensitivity by modality", 0.0)
        found = balance.token_weights(balance.sensitivities(logits, shown))
        self._job.progress(f"{self._label}: sensitivity by modality", 1.0)
        return found

    def _plain(self, name: str) -> Held:
        """A weight that is kept, in the type that the step names."""
        exact = self._job.model.exact(self._step.part)[name]
        values: Any = (
            exact.numpy().reshape(self._job.shapes[self._step.part][f"{name}.weight"]).astype(KINDS[self._step.keep][1])
        )
        if not np.isfinite(values.astype(np.float32)).all():
            raise ConfigError(f"{self._step.part}: {name} does not fit {self._step.keep}", hint='keep = "bf16"')
        return np.asarray(values)

    def _typed(self, grid: Grid) -> Grid:
        """Its scales in the model's own type: a reader holds them in no other."""
        return replace(grid, scale_type=KINDS[self._job.kind][2])


def _both(name: str) -> tuple[str, str]:
    return f"{name}.weight", f"{name}.bias"


def _shift(exact: Tensor, held: Held, mean: Tensor) -> Tensor:
    """What rounding takes from a product on average, (rows,): its bias gives it back (arXiv:1906.04721)."""
    lost = exact - torch.from_numpy(np.asarray(plain(held), np.float32)).reshape(exact.shape)
    rows = lost.flatten(1).sum(1) * mean if exact.ndim == 5 else lost.flatten(1) @ mean
    return rows
