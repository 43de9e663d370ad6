"""Take a recipe's steps one after another: calibrate, move scales, round, in windows of layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import torch
from torch import Tensor

from triptych.compress import awq, balance
from triptych.compress.calibrate import Seen, calibrate, gram_bytes
from triptych.compress.fold import fold, folds
from triptych.compress.gptq import gptq
from triptych.compress.kept import keep, kept
from triptych.compress.mixed import Shapes, layer_of, weights_of, widths
from triptych.compress.model import TOWERS, Changed, Model
from triptych.compress.recipe import Recipe, RecipeStep, Resolved, resolve
from triptych.compress.rounding import Grid, ScaleType, round_weight
from triptych.compress.samples import Sample
from triptych.compress.smooth import smooth_scales
from triptych.core.progress import Progress, silent
from triptych.core.quantized import Held, plain
from triptych.core.spec import Modality
from triptych.errors import ConfigError, TriptychError

CLIPS = 8  # fewer bits gain by clipping the range; with 8 the search costs minutes and moves the loss by nothing
GRAM_BYTES = 256 << 20  # of calibration in memory at a time: a window of layers, at least one
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
    """changed: what took a tensor's place, by part and own name. remarks: sentences on what could not be as asked."""

    changed: Changed
    remarks: tuple[str, ...]


def compress(job: Job) -> Made:
    """Every step of the recipe, in order; a later one is calibrated on what the earlier ones left.

    Raises ConfigError where the recipe does not fit the model, or its samples lack what it calibrates.
    """
    steps = resolved(job)
    for found in steps:
        _refuse_blind(found.step, job)
    changed: Changed = {}
    remarks: list[str] = []
    for number, found in enumerate(steps, 1):
        job.model.use(changed)
        taken = _Step(job, found, number, len(steps))
        own = taken.take(changed)
        changed[found.step.part] = changed.get(found.step.part, {}) | own
        remarks += [*found.fallbacks, *taken.remarks]
    return Made(changed=changed, remarks=tuple(dict.fromkeys(remarks)))


def resolved(job: Job) -> tuple[Resolved, ...]:
    """The recipe's steps with the weights that they meet."""
    return resolve(job.recipe, {part: weights_of(own) for part, own in job.shapes.items()})


def calibrates(step: RecipeStep) -> bool:
    """Whether a step looks at samples."""
    few = any(bits < 8 for bits in step.all_bits)
    return few or step.scale != "none" or step.round == "gptq" or step.activations is not None


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
    """One step being taken: its part's tensors as they are folded, and what was said on the way."""

    def __init__(self, job: Job, found: Resolved, number: int, count: int) -> None:
        self.remarks: list[str] = []
        self._job = job
        self._found = found
        self._step = found.step
        self._graph = "decoder" if found.step.part == "embedding" else found.step.part
        self._label = f"{found.step.part}, step {number} of {count}"
        self._weights: dict[str, dict[Modality, float]] = {}  # of each block's end, a token's weight by modality

    def take(self, before: Changed) -> dict[str, Held]:
        """All of the step's tensors. `before`: what earlier steps changed; the model has it in place."""
        if self._step.is_kept:
            return {f"{name}.weight": self._plain(name) for name in self._found.names}
        if self._step.scale == "mbq":
            self._weights = self._felt()
        done: dict[str, Held] = {}
        by_width: dict[int, dict[str, Held]] = {bits: {} for bits in self._step.all_bits}
        windows = list(self._windows())
        for place, names in enumerate(windows):
            path = self._path(names)
            if not path.is_file():
                keep(self._window(names, (place, len(windows))), path)
            for name, held in kept(path).items():
                bits, _, own = name.partition("/")
                by_width[int(bits)][own] = held
            done = by_width[max(by_width)]
            mine = before.get(self._step.part, {}) | done
            self._job.model.use(before | {self._step.part: mine})
        if self._step.widths:
            done = widths(self._job.model, self._job.samples, self._step, by_width)
        self._job.progress(self._label, 1.0)
        return done

    # ── a window of layers ─────────────────────────────────────────────────────────────────────────────────────

    def _windows(self) -> Iterator[tuple[str, ...]]:
        """Layers together, as many as calibration has memory for; all at once where it is not needed."""
        if not calibrates(self._step):
            yield self._found.names
            return
        exact = self._job.model.exact(self._step.part)
        layers: dict[str, list[str]] = {}
        for name in self._found.names:
            layers.setdefault(layer_of(name), []).append(name)
        window: list[str] = []
        for names in layers.values():
            size = gram_bytes({name: exact[name] for name in [*window, *names] if exact[name].ndim < 5})
            if window and size > self._job.gram_bytes:
                yield tuple(window)
                window = []
            window += names
        yield tuple(window)

    def _path(self, names: tuple[str, ...]) -> Path:
        """Where this window's result lies: its name tells all that it depends on but the code."""
        earlier = [msgspec.json.encode(step).decode() for step in self._job.recipe.steps]
        samples = [sample.token_ids.tobytes().hex() for sample in self._job.samples]
        facts = (self._job.seed, self._job.kind, earlier, samples, self._label, names, self._job.gram_bytes)
        return self._job.work / f"{hashlib.sha256(msgspec.json.encode(facts)).hexdigest()}.safetensors"

    def _window(self, names: tuple[str, ...], place: tuple[int, int]) -> dict[str, Held]:
        """The window's tensors, under their width: `4/layers.0.mlp.up_proj.weight`. place: which of how many it is."""
        number, count = place
        self._job.progress(self._label, number / count)
        tensors = dict(self._job.model.exact(self._step.part))
        seen: dict[str, Seen] = {}
        if calibrates(self._step):
            met = [name for name in names if name in self._job.model.parts[self._graph].weights]  # no table is
            seen = calibrate(self._job.model, self._job.samples, self._graph, met)
        small = self._fold(names, tensors, seen)
        made: dict[str, Held] = {}
        for bits in self._step.all_bits:
            biases = {name: tensors[name] for name in small}
            for done, name in enumerate(names):
                self._job.progress(self._label, (number + done / len(names)) / count)
                held = self._rounded(name, bits, tensors, seen)
                made[f"{bits}/{name}.weight"] = held
                if f"{name}.bias" in tensors and name in seen:
                    biases[f"{name}.bias"] = tensors[f"{name}.bias"].flatten() + _shift(
                        tensors[name], held, seen[name].mean
                    )
            for name, values in biases.items():
                full = name if name.endswith(".bias") else f"{name}.weight"
                made[f"{bits}/{full}"] = self._as_small(full, values)
        return made

    def _as_small(self, full: str, values: Tensor) -> Held:
        """A norm or a bias in its part's own type."""
        part = self._step.part
        values = values.reshape(self._job.shapes[part][full])
        return np.asarray(values.numpy().astype(KINDS[self._job.small_kinds[part]][1]))

    def _fold(self, names: tuple[str, ...], tensors: dict[str, Tensor], seen: dict[str, Seen]) -> list[str]:
        if self._step.scale == "none":
            return []
        pairs = folds(names, tensors)
        if not pairs:
            self.remarks.append(f"{self._step.part}: nothing makes an input that {self._step.scale} could scale")
        small: list[str] = []
        for pair in pairs:
            readers = [tensors[name] for name in pair.readers]
            if self._step.scale == "smooth":
                most = torch.stack([reader.abs().amax(0) for reader in readers]).amax(0)
                scales = smooth_scales(seen[pair.readers[0]].range, most)
            else:
                weighed = self._weighed(pair.readers[0], seen)
                scales = awq.search(readers, weighed, self._grid(pair.readers[0], min(self._step.all_bits))).scales
            small += fold(tensors, seen, pair, scales, KINDS[self._job.small_kinds[self._step.part]][0])
        return small

    def _rounded(self, name: str, bits: int, tensors: dict[str, Tensor], seen: dict[str, Seen]) -> Held:
        weight = tensors[name].flatten(1)
        own = seen.get(name)
        channels = self._weighed(name, seen) if own is not None and own.channels else None
        try:
            if self._step.round == "gptq" and channels is not None:
                found = gptq(weight, channels.gram, self._grid(name, bits))
            else:
                importance = None if channels is None else channels.gram.diagonal()
                found = round_weight(weight, self._grid(name, bits), importance=importance, clip=bits < CLIPS)
        except TriptychError as error:
            raise type(error)(f"{self._step.part}: {name}: {error.message}", hint=error.hint) from error
        scale = None
        if self._step.activations is not None and own is not None:
            scale = own.step() or None
        return replace(found, shape=self._shape(name), input_scale=scale)

    def _weighed(self, name: str, seen: dict[str, Seen]) -> awq.Channels:
        return awq.balanced(seen[name].channels, self._weights.get(balance.block_end(name)))

    def _felt(self) -> dict[str, dict[Modality, float]]:
        """How much a token of each modality weighs in each block: one backward pass over the samples."""
        model = self._job.model

        def logits(sample: Sample, judged: Any, hooks: Any) -> Tensor:
            with torch.no_grad():
                embeddings = model.embed(sample)
            return model.decode(embeddings, judged, {"decoder": hooks})

        self._job.progress(f"{self._label}: sensitivity by modality", 0.0)
        found = balance.token_weights(balance.sensitivities(logits, self._job.samples))
        self._job.progress(f"{self._label}: sensitivity by modality", 1.0)
        return found

    def _plain(self, name: str) -> Held:
        """A weight that is kept, in the type that the step names."""
        exact = self._job.model.exact(self._step.part)[name]
        values: Any = exact.numpy().reshape(self._shape(name)).astype(KINDS[self._step.keep][1])
        if not np.isfinite(values.astype(np.float32)).all():
            raise ConfigError(f"{self._step.part}: {name} does not fit {self._step.keep}", hint='keep = "bf16"')
        return np.asarray(values)

    def _grid(self, name: str, bits: int) -> Grid:
        """The step's grid, its scales in the model's own type: a reader holds them in no other."""
        return replace(self._found.grids[name][bits], scale_type=KINDS[self._job.kind][2])

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._job.shapes[self._step.part][f"{name}.weight"]


def _shift(exact: Tensor, held: Held, mean: Tensor) -> Tensor:
    """What rounding takes from a product on average, (rows,): its bias gives it back (arXiv:1906.04721)."""
    lost = exact - torch.from_numpy(np.asarray(plain(held), np.float32)).reshape(exact.shape)
    rows = lost.flatten(1).sum(1) * mean if exact.ndim == 5 else lost.flatten(1) @ mean
    return rows
