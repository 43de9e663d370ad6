"""Where a model's bytes, its sensitivity and its attention are: measured on samples, piece by piece."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.backends.torch_graph import Hooks
from triptych.compress.attention import LayerAttention, Watch, mean_layers
from triptych.compress.loss import divergence, unmet
from triptych.compress.mixed import layer_of
from triptych.compress.model import Model
from triptych.compress.prediction import KeepPoint, predictions, wanted_keep
from triptych.compress.report import Analysis, Glance, PartBytes, Sensitivity
from triptych.compress.rounding import Grid, fitted, round_weight
from triptych.compress.samples import Sample
from triptych.core.policy import Method, Reduction
from triptych.core.quantized import Held
from triptych.core.request import Patches
from triptych.core.spec import Fact, Modality
from triptych.media.reduce import Reduced, reduce

GRIDS = (Grid(bits=4, group_size=64), Grid(bits=8))
RATIOS = (0.25, 0.5, 0.75)
FEW = 8  # samples that single layers are measured on, at most
GLANCES = 3
PIXELS = 256  # side of a picture in the report
T = TypeVar("T")


class Seen(Fact, frozen=True, kw_only=True):
    """One sample's attention. received: each media token's share of a text row's whole, mean over layers."""

    layers: tuple[LayerAttention, ...]
    received: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to analyze, on what. work: the file of finished pieces; its name stands for the model and the samples."""

    name: str
    fed: str  # the samples, in words
    parts: tuple[PartBytes, ...]
    model: Model
    samples: Sequence[Sample]  # each with an answer
    work: Path
    spell: Callable[[NDArray[np.float32]], tuple[str, ...]]  # rows as the words that are nearest, or ""
    per_tile: int = 1  # media tokens of a tile
    grid: int = 0  # side of the square that these are in the picture; 0: they have no place there
    method: Method = "cenprune"
    progress: Callable[[str, float], None] = lambda what, share: None


def analyze(job: Job) -> Analysis:
    """Everything, from what `job.work` holds and what is measured now."""
    runs = _Runs(job)
    sensitivities = runs.sensitivities()
    seen = [runs.seen(at) for at in runs.told(range(len(job.samples)), "attention")]
    shown = [at for at, sample in enumerate(job.samples) if sample.has_media]
    wanted = {at: wanted_keep(seen[at].received) for at in shown}
    known = [keep for keep in wanted.values() if keep is not None]
    proposed = round(float(np.quantile(known, 0.9)), 2) if known else None
    ratios = sorted({*RATIOS, proposed or 1.0} - {1.0})
    wishes = [(keep, at) for keep in ratios for at in shown]
    points = tuple(runs.point(at, keep, seen[at].received) for keep, at in runs.told(wishes, "loss"))
    return Analysis(
        name=job.name,
        fed=job.fed,
        method=job.method,
        parts=job.parts,
        sensitivities=tuple(sensitivities),
        layers=tuple(mean_layers([list(seen[at].layers) for at in shown or range(len(seen))])),
        proposed=proposed,
        points=points,
        predictions=predictions(points),
        glances=tuple(runs.glance(at) for at in shown[:GLANCES]),
    )


class _Runs:
    """Runs samples, unless `work` says what came of it before. Samples go by their place."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._decoder = job.model.parts["decoder"]
        self._exact: dict[int, Tensor] = {}
        self._done: dict[str, msgspec.Raw] = {}
        if job.work.is_file():
            self._done = msgspec.json.decode(job.work.read_bytes(), type=dict[str, msgspec.Raw])

    def told(self, items: Sequence[T], what: str) -> Iterator[T]:
        for place, item in enumerate(items):
            self._job.progress(what, place / len(items))
            yield item
        self._job.progress(what, 1.0)

    def _piece(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        if name not in self._done:
            self._done[name] = msgspec.Raw(msgspec.json.encode(measure()))
            self._job.work.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._job.work.with_suffix(".part")
            scratch.write_bytes(msgspec.json.encode(self._done))
            scratch.replace(self._job.work)
        return msgspec.json.decode(self._done[name], type=kind)

    def _logprobs(self, embeddings: Any, positions: Any, sampled: Any, hooks: Hooks | None = None) -> Tensor:
        arrays = {"embeddings": embeddings, "position_ids": positions, "sampled": sampled}
        with torch.no_grad():
            return torch.log_softmax(self._decoder(arrays, hooks)["logits"], -1)

    def _whole(self, sample: Sample, embeddings: Any, hooks: Hooks | None = None) -> Tensor:
        return self._logprobs(embeddings, np.arange(sample.num_tokens), sample.judged, hooks)

    def _exactly(self, at: int) -> Tensor:
        """The fp32 model's; it must be in place when a sample is first asked for."""
        if at not in self._exact:
            self._exact[at] = self._whole(self._job.samples[at], self._job.samples[at].embeddings)
        return self._exact[at]

    # ── sensitivity ────────────────────────────────────────────────────────────────────────────────────────────

    def sensitivities(self) -> list[Sensitivity]:
        """Each part alone, then each layer of vision and decoder; no tower that no sample shows anything."""
        wishes: list[tuple[str, str, list[str], Grid]] = []
        parts = [own.name for own in self._job.parts]
        blind = unmet(self._job.samples, parts)
        for part in (part for part in parts if part not in blind):
            exact = self._job.model.exact(part)
            layers: dict[str, list[str]] = {}
            for name in exact:
                if exact[name].ndim > 1 and not name.startswith("words."):  # rows of the table, not the projector's
                    layers.setdefault(layer_of(name), []).append(name)
            groups = {"": sum(layers.values(), [])} | (layers if part in ("vision", "decoder") else {})
            wishes += [(part, layer, names, grid) for layer, names in groups.items() for grid in GRIDS]
        found = []
        for part, layer, names, grid in self.told(wishes, "sensitivity"):
            measure = partial(self._sensitive, part, layer, names, grid)
            found.append(self._piece(f"sensitivity {part} {layer} {grid.bits}", Sensitivity, measure))
        return found

    def _sensitive(self, part: str, layer: str, names: list[str], grid: Grid) -> Sensitivity:
        model, samples = self._job.model, self._job.samples
        places = range(0, len(samples), -(-len(samples) // FEW) if layer else 1)
        exact = {at: self._exactly(at) for at in places}
        rounded: dict[str, Held] = {}
        for name in names:
            weight = model.exact(part)[name].flatten(1)
            rounded[f"{name}.weight"] = round_weight(weight, fitted(grid, name, weight.shape[1])[0])
        model.use({part: rounded})
        losses = []
        for at in places:  # a decoder's change leaves the embeddings as they are
            with torch.no_grad():
                embeddings = samples[at].embeddings if part == "decoder" else model.embed(samples[at])
            losses.append(divergence(exact[at], self._whole(samples[at], embeddings)))
        model.use({})
        nats, same = (np.concatenate(own) for own in zip(*losses, strict=True))
        return Sensitivity(
            part=part, layer=layer, bits=grid.bits, divergence=float(nats.mean()), same_top=float(same.mean())
        )

    # ── attention, and what may be left out ────────────────────────────────────────────────────────────────────

    def seen(self, at: int) -> Seen:
        def measure() -> Seen:
            watch = self._watched(self._job.samples[at])
            return Seen(layers=tuple(watch.layers), received=tuple(np.mean(watch.received, axis=0).tolist()))

        return self._piece(f"attention {at}", Seen, measure)

    def _watched(self, sample: Sample) -> Watch:
        watch = Watch.over(sample.modality)
        self._whole(sample, sample.embeddings, Hooks(on_attention=watch))
        return watch

    def point(self, at: int, keep: float, received: Sequence[float]) -> KeepPoint:
        """Rows are dropped before the decoder; those that stay keep their positions."""
        sample, method = self._job.samples[at], self._job.method

        def measure() -> KeepPoint:
            rows, positions = reduced(sample, Reduction(method=method, keep=keep))
            tested = self._logprobs(rows, positions, np.searchsorted(positions, sample.judged))
            nats, same = divergence(self._exactly(at), tested)
            is_lost = ~np.isin(np.flatnonzero(sample.modality != Modality.TEXT), positions)
            return KeepPoint(
                sample=sample.name,
                keep=keep,
                divergence=float(nats.mean()),
                same_top=float(same.mean()),
                shortfall=max(0.0, 1 - keep / (wanted_keep(received) or keep)),
                lost=float(np.array(received)[is_lost].sum()),
            )

        return self._piece(f"keep {method} {keep:g} {at}", KeepPoint, measure)

    def glance(self, at: int) -> Glance:
        sample, job = self._job.samples[at], self._job

        def measure() -> Glance:
            step = max(1, sample.tiles.shape[1] // PIXELS)
            tiles = sample.tiles[:, ::step, ::step]
            return Glance(
                sample=sample.name,
                side=tiles.shape[1],
                tiles=tuple(base64.b64encode(tile.tobytes()).decode() for tile in tiles),
                grid=job.grid,
                places=tuple(divmod(int(row), job.per_tile) for row in sample.rows if job.grid),
                words=job.spell(sample.embeddings[sample.modality != Modality.TEXT]),
                shares=tuple(tuple(np.round(own, 5).tolist()) for own in self._watched(sample).received),
            )

        return self._piece(f"glance {at}", Glance, measure)


def reduced(sample: Sample, reduction: Reduction) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The sample's rows with every run of media reduced, and the position that each had: (k, hidden), (k,)."""
    is_media = sample.modality != Modality.TEXT
    rows, places, last = [], [], 0
    for start, end in np.flatnonzero(np.diff(is_media, prepend=False, append=False)).reshape(-1, 2):
        kept = _kept(sample, slice(start, end), reduction)
        rows += [sample.embeddings[last:start], kept.rows]
        places += [np.arange(last, start), start + kept.kept]
        last = end
    rows.append(sample.embeddings[last:])
    places.append(np.arange(last, sample.num_tokens))
    return np.concatenate(rows), np.concatenate(places)


def _kept(sample: Sample, run: slice, reduction: Reduction) -> Reduced:
    """`media/reduce` on one run, as on an item of its own."""
    rows = sample.embeddings[run]
    is_asked = (sample.modality == Modality.TEXT) & ~sample.is_answer & (np.arange(sample.num_tokens) >= run.stop)
    item = Patches(
        digest=f"{sample.name} {run.start}",
        modality=Modality(int(sample.modality[run.start])),
        tiles=sample.tiles[:0],
        take=np.arange(len(rows), dtype=np.int32),
        reduction=reduction,
    )
    return reduce(item, rows, sample.embeddings[is_asked])


def nearest(rows: NDArray[np.float32], table: NDArray[np.float32], *, least: float = 0.6) -> list[int | None]:
    """The token whose embedding each row points along; None where no cosine comes to `least`."""
    ways, among = (part / (np.linalg.norm(part, axis=1, keepdims=True) + 1e-12) for part in (rows, table))
    cosines = ways @ among.T
    return [int(best) if own[best] >= least else None for own, best in zip(cosines, cosines.argmax(1), strict=True)]
