"""The whole model in torch, fp32 or compressed: a sample in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.backends.torch_graph import Hooks, Run, TorchPart
from triptych.compress.samples import Sample
from triptych.core.bundle import Bundle
from triptych.core.quantized import Held, Quantized, plain
from triptych.core.spec import Modality
from triptych.core.table import Table, open_table

TILES_AT_ONCE = 4
TABLE, WEIGHT = "embed_tokens.weight", ".weight"
TOWERS = ("vision", "projector")
Changed = dict[str, dict[str, Held]]  # of each part of a recipe, by its own name of a tensor: what took its place
HooksOf = Mapping[str, Hooks]  # by part of the graph


class Model:
    """The fp32 parts of a bundle and its token table; `use` puts changed tensors in their place."""

    def __init__(self, parts: Mapping[str, TorchPart], table: Table) -> None:
        self.parts = dict(parts)
        self._exact = {part: dict(opened.weights) for part, opened in parts.items()}
        self._exact_table = self._table = table
        self._rounding: dict[str, Hooks] = {}
        self._read: dict[int, tuple[Held, Tensor]] = {}  # what is in place, by identity: read once

    @classmethod
    def open(cls, bundle: Bundle) -> Model:
        """Raises BackendError where the bundle is not one in fp32."""
        names = [*TOWERS, "decoder"] if bundle.manifest.spec.vision is not None else ["decoder"]
        parts = {part: TorchPart.open(bundle.file(f"{part}.xml")) for part in names}
        return cls(parts, open_table(bundle.file("embedding.npy")))

    def exact(self, part: str) -> dict[str, Tensor]:
        """The fp32 tensors of a part of the recipe, by own name: the head is the embedding's, not the decoder's."""
        graph = self._exact["decoder" if part == "embedding" else part]
        found = {name: graph[name] for name in graph if part not in ("decoder", "embedding") or _owner(name) == part}
        if part == "embedding" and TABLE.removesuffix(WEIGHT) not in found:
            rows = np.arange(len(found["lm_head"]), dtype=np.int32)
            found[TABLE.removesuffix(WEIGHT)] = torch.from_numpy(self._exact_table(rows))
        return found

    def use(self, changed: Changed) -> None:
        """Put these in place of the exact tensors, and nothing else; inputs with a static scale are rounded too."""
        present = {id(held) for own in changed.values() for held in own.values()}
        self._read = {key: read for key, read in self._read.items() if key in present}
        for part, opened in self.parts.items():
            own = changed.get(part, {}) | (changed.get("embedding", {}) if part == "decoder" else {})
            exact = self._exact[part]
            found = {name.removesuffix(WEIGHT): held for name, held in own.items()}
            found = {name: held for name, held in found.items() if name in exact}  # an untied table is in no graph
            opened.weights = exact | {
                name: self._tensor(held).reshape(exact[name].shape) for name, held in found.items()
            }
            scales = {name: held.input_scale for name, held in found.items() if isinstance(held, Quantized)}
            self._rounding[part] = Hooks(on_input=_rounds({name: s for name, s in scales.items() if s is not None}))
        table = changed.get("embedding", {}).get(TABLE)
        self._table = self._exact_table if table is None else np.asarray(plain(table), np.float32).__getitem__

    def put(self, part: str, tensors: Mapping[str, Held]) -> None:
        """These too, in a part's graph; its runs that are halted go on with them."""
        weights = self.parts[part].weights
        for name, held in ((name.removesuffix(WEIGHT), held) for name, held in tensors.items()):
            weights[name] = torch.from_numpy(np.array(plain(held), np.float32)).reshape(weights[name].shape)

    def embed(self, sample: Sample, hooks: HooksOf | None = None) -> Tensor:
        """(T, hidden): the table's rows, and the towers' at media tokens."""
        found = torch.from_numpy(self._table(np.where(sample.modality == Modality.TEXT, sample.token_ids, 0)))
        if len(sample.tiles):
            rows: list[Tensor] = []
            extra: list[Tensor] = []
            for tiles in batches(sample):
                out = self.see(tiles, hooks)
                rows.append(out["embeddings"].flatten(0, 1))
                extra = [out["extra"]] if "extra" in out else []
            shown = torch.cat(rows + extra)[torch.from_numpy(sample.rows).long()]
            found = found.index_put((torch.from_numpy(sample.modality != Modality.TEXT),), shown)
        return found

    def see(self, tiles: NDArray[np.uint8], hooks: HooksOf | None = None) -> dict[str, Tensor]:
        """What the projector makes of a few tiles: embeddings (n, tokens, hidden), and its extra rows."""
        return self._run("projector", {"features": self._run("vision", {"pixels": tiles}, hooks)["features"]}, hooks)

    def decode(self, embeddings: Tensor, sampled: Any, hooks: HooksOf | None = None) -> Tensor:
        """Logits (R, vocab) of the positions `sampled`."""
        arrays = {"embeddings": embeddings, "position_ids": np.arange(len(embeddings)), "sampled": sampled}
        logits: Tensor = self._run("decoder", arrays, hooks)["logits"]
        return logits

    def runs(self, part: str, sample: Sample) -> Iterator[Run]:
        """Of `part` over a sample, every position asked for: one run, or as many as its tiles take."""
        rounding = self._rounding.get(part)
        if part == "decoder":
            everywhere = np.arange(sample.num_tokens)
            arrays = {"embeddings": self.embed(sample), "position_ids": everywhere, "sampled": everywhere}
            yield self.parts[part].halting(arrays, rounding)
            return
        for tiles in batches(sample):
            seen = {"pixels": tiles} if part == "vision" else self._run("vision", {"pixels": tiles}, None)
            yield self.parts[part].halting(
                {name: seen[name] for name in ("pixels", "features") if name in seen}, rounding
            )

    def logits(self, sample: Sample) -> Tensor:
        """Of the positions that predict the sample's answer, (R, vocab)."""
        return self.decode(self.embed(sample), sample.judged)

    def watched(self, part: str, look: Callable[[str, Tensor], Tensor]) -> HooksOf:
        """Hooks that look at each weight's input in `part`, after its rounding where it is rounded."""
        rounding = self._rounding.get(part, Hooks()).on_input
        return {part: Hooks(on_input=look if rounding is None else lambda name, x: look(name, rounding(name, x)))}

    def _tensor(self, held: Held) -> Tensor:
        if id(held) not in self._read:
            self._read[id(held)] = held, torch.from_numpy(np.array(plain(held), np.float32))
        return self._read[id(held)][1]

    def _run(self, part: str, arrays: Mapping[str, Any], hooks: HooksOf | None) -> dict[str, Tensor]:
        chosen = None if hooks is None else hooks.get(part)
        found: dict[str, Tensor] = self.parts[part](arrays, chosen or self._rounding.get(part))
        return found


def batches(sample: Sample) -> list[NDArray[np.uint8]]:
    return [sample.tiles[start : start + TILES_AT_ONCE] for start in range(0, len(sample.tiles), TILES_AT_ONCE)]


def fake_quantized(x: Tensor, scale: float) -> Tensor:
    """x in 8 bits, symmetric; what cannot be negative has all steps on its one side, as `compile` builds it."""
    if bool((x >= 0).all()):
        step = scale * 127 / 255
        return torch.clamp(torch.round(x / step), 0, 255) * step
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def _rounds(scales: Mapping[str, float]) -> Callable[[str, Tensor], Tensor] | None:
    if not scales:
        return None
    return lambda name, x: fake_quantized(x, scales[name]) if name in scales else x


def _owner(name: str) -> str:
    return "embedding" if name in ("embed_tokens", "lm_head") else "decoder"
