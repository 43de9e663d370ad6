"""A checkpoint or an fp32 bundle in, an analysis out: open it, make samples, measure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.compress import samples as calibration
from triptych.compress.analysis import Job, analyze, nearest
from triptych.compress.model import Model
from triptych.compress.report import Analysis, PartBytes
from triptych.compress.samples import Conversation, Sample
from triptych.core.bundle import MANIFEST, Bundle, open_bundle
from triptych.core.policy import Method
from triptych.core.progress import Progress
from triptych.core.table import open_table
from triptych.errors import BundleError, ConfigError
from triptych.media.text import Text
from triptych.session.calibration import prepare, reader_digest
from triptych.session.compression import in_fp32
from triptych.session.opening import CACHE


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeConfig:
    """What was asked. samples: a `samples.jsonl`, None: the built-in set. method: whose loss is measured."""

    samples: Path | None = None
    method: Method = "cenprune"
    cache: Path = CACHE


def analyze_model(source: Path, config: AnalyzeConfig, progress: Progress) -> Analysis:
    """Raises ConfigError, CheckpointError, BundleError, GateError or BackendError.

    Every finished measurement is kept in the cache, under a name made of the model and the samples.
    """
    bundle = _exact(source, config.cache, progress)
    sees = bundle.manifest.spec.vision is not None
    given = calibration.builtin(sees=sees) if config.samples is None else calibration.read(config.samples)
    samples = [sample for sample in prepare(bundle, given, progress, cache=config.cache) if len(sample.judged)]
    if not samples:
        raise ConfigError(f"none of the {len(given)} samples has an answer", hint="add assistant messages to them")
    spec = bundle.manifest.spec
    per_tile, side = 1, 0
    if spec.projector is not None and spec.projector.kind != "soft_words":  # which have no place in the picture
        per_tile = spec.projector.num_tokens
        side = math.isqrt(per_tile) if math.isqrt(per_tile) ** 2 == per_tile else 0
    parts = [
        PartBytes(
            name=part.name,
            precision=part.precision,
            num_parameters=part.num_parameters,
            num_bytes=bundle.manifest.num_bytes(part),
        )
        for part in bundle.manifest.parts
    ]
    job = Job(
        name=bundle.manifest.name,
        fed=_fed(config, samples),
        parts=tuple(parts),
        model=Model.open(bundle),
        samples=samples,
        work=config.cache / "analyses" / f"{_digest(bundle, given)}.json",
        spell=_Speller(bundle),
        per_tile=per_tile,
        grid=side,
        method=config.method,
        progress=progress,
    )
    return analyze(job)


class _Speller:
    """Rows as the words of the decoder's own table that lie nearest."""

    def __init__(self, bundle: Bundle) -> None:
        self._table = open_table(bundle.file("embedding.npy"))
        self._vocab_size = bundle.manifest.spec.decoder.vocab_size
        self._text = Text.open(bundle.path)

    def __call__(self, rows: NDArray[np.float32]) -> tuple[str, ...]:
        found = nearest(rows, self._table(np.arange(self._vocab_size, dtype=np.int32)))
        return tuple("" if one is None else self._text.token_bytes(one).decode(errors="replace") for one in found)


def _exact(source: Path, cache: Path, progress: Progress) -> Bundle:
    if not (source / MANIFEST).is_file():
        return in_fp32(source, cache, progress)
    bundle: Bundle = open_bundle(source)
    parts = [part for part in bundle.manifest.parts if part.name != "embedding"]  # a table is stored as it came
    rounded = [f"{part.name} in {part.precision}" for part in parts if part.precision != "fp32"]
    if rounded:
        raise BundleError(
            f"{source} holds the {', '.join(rounded)}: what rounding costs is measured on the exact weights",
            hint="analyze the checkpoint that it was compiled from, or compile that with --weights fp32",
        )
    return bundle


def _digest(bundle: Bundle, given: Sequence[Conversation]) -> str:
    facts = (reader_digest(bundle), *(one.digest for one in given))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _fed(config: AnalyzeConfig, samples: Sequence[Sample]) -> str:
    name = "the built-in samples: a few everyday ones" if config.samples is None else config.samples.name
    return f"{name}; {len(samples)} in all, {sum(sample.has_media for sample in samples)} with pictures"
