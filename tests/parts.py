"""A checkpoint's parts compiled in fp32 into a folder, as backends open them; and steps for a paged decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from triptych.backends.base import Array, Executable, PagedDecoder, Placement
from triptych.compile import decoder, projector, vit
from triptych.compile.checkpoint import Checkpoint
from triptych.compile.families import family_of
from triptych.compile.graph import Store
from triptych.core.spec import ModelSpec

EXACT = Placement(compute="float", num_threads=1)
BLOCK = 32


@dataclass(frozen=True)
class Parts:
    """One model, opened by one backend."""

    spec: ModelSpec
    vision: Executable
    projector: Executable
    decoder: PagedDecoder
    table: NDArray[np.float32]  # the token embeddings


def compile_parts(source: Path, target: Path) -> ModelSpec:
    """Write vision.xml, projector.xml and decoder.xml, without the verdicts and the manifest of a bundle."""
    checkpoint = Checkpoint.open(source)
    family = family_of(checkpoint)
    spec = family.read_spec(checkpoint)
    weights = family.weights(checkpoint, spec)
    assert spec.vision is not None
    assert spec.projector is not None
    models = {
        "vision": vit.build(spec.vision, weights["vision"], Store("fp32")),
        "projector": projector.build(spec.projector, spec.vision, weights["projector"], Store("fp32")),
        "decoder": decoder.build(spec.decoder, weights["decoder"], Store("fp32")),
    }
    target.mkdir(parents=True)
    for name, model in models.items():
        ov.save_model(model, target / f"{name}.xml", compress_to_fp16=False)
    np.save(target / "embedding.npy", weights["decoder"]("embed_tokens.weight").astype(np.float32))
    return spec


def open_ov(spec: ModelSpec, folder: Path) -> Parts:
    from triptych.backends import ov as backend

    return Parts(
        spec=spec,
        vision=backend.open_part(folder / "vision.xml", EXACT),
        projector=backend.open_part(folder / "projector.xml", EXACT),
        decoder=backend.open_decoder(folder / "decoder.xml", EXACT, "f32"),
        table=np.load(folder / "embedding.npy"),
    )


def open_reference(spec: ModelSpec, source: Path) -> Parts:
    from triptych.backends.reference import Reference

    opened = Reference.open(source)
    table = opened.model.get_input_embeddings().weight.detach().numpy()
    return Parts(spec, opened.part("vision"), opened.part("projector"), opened.decoder(), table)


@dataclass(frozen=True)
class Run:
    """Some tokens of one sequence: `past` are in the cache already, `blocks` are its pages."""

    embeddings: NDArray[np.float32]
    past: int
    blocks: Sequence[int]


def step(runs: Sequence[Run], sampled: Sequence[int]) -> dict[str, Array]:
    """The inputs of one call of a paged decoder. `sampled` counts over all runs' tokens."""
    lens = [len(run.embeddings) for run in runs]
    return {
        "embeddings": np.concatenate([run.embeddings for run in runs]),
        "position_ids": np.concatenate([run.past + np.arange(n) for run, n in zip(runs, lens, strict=True)]),
        "past_lens": np.array([run.past for run in runs], np.int32),
        "subsequence_begins": np.array([0, *np.cumsum(lens)], np.int32),
        "block_indices": np.array([block for run in runs for block in run.blocks], np.int32),
        "block_indices_begins": np.array([0, *np.cumsum([len(run.blocks) for run in runs])], np.int32),
        "max_context_len": np.array(max(run.past + n for run, n in zip(runs, lens, strict=True)), np.int32),
        "sampled": np.array(sampled, np.int64),
    }


def whole(parts: Parts, embeddings: NDArray[np.float32], blocks: Sequence[int]) -> NDArray[np.float32]:
    """Logits of every position of one sequence in one call."""
    return parts.decoder(step([Run(embeddings, 0, blocks)], range(len(embeddings))))["logits"].copy()
