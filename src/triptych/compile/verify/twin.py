"""The slow twin of a part: the same graph in fp32, run in windows of layers when it is large.

A decoder's layers are built, run and thrown away a window at a time, so that the twin of a model of several GB never
stands in memory whole. A window's output is the next one's input, in fp32: cut or whole, the logits are equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as op

from triptych.backends import ov as backend
from triptych.backends.base import Array, Executable, Placement
from triptych.compile import parts
from triptych.compile.decoder import residual_name
from triptych.compile.graph import Store
from triptych.core.quantized import Held
from triptych.core.spec import DecoderSpec, ModelSpec

EXACT = Placement(compute="float")
WINDOW_BYTES = 1 << 30  # of fp32 weights: at least one layer, at most all
TILES_AT_ONCE = 4

Rows = NDArray[np.float32]
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A model in fp32, built from its checkpoint part by part and never kept."""

    spec: ModelSpec
    weights: parts.Weights
    window_bytes: int = WINDOW_BYTES

    def features(self, tiles: NDArray[np.uint8]) -> Rows:
        """(num_tiles, size, size, 3) uint8 → (num_tiles, tokens, width)."""
        return encode(self._open(self._build("vision", self.weights)), tiles)

    def project(self, features: Rows) -> dict[str, Array]:
        """(num_tiles, tokens, width) → embeddings (num_tiles, tokens_out, hidden), and `extra` where it has any."""
        return self._open(self._build("projector", self.weights))({"features": features})

    def logits(self, prompts: Sequence[Rows], judged: Sequence[Positions]) -> list[Rows]:
        """Embeddings of each prompt, (T, hidden), to logits of its `judged` positions, (R, vocab)."""
        states = list(prompts)
        for window in _windows(self.spec.decoder, self.window_bytes):
            part = self._open(self._window(window))
            if window.stop == self.spec.decoder.num_layers:
                return [decode(part, state, wanted) for state, wanted in zip(states, judged, strict=True)]
            states = [decode(part, state, np.arange(len(state))) for state in states]
        raise AssertionError("a decoder has layers")

    def _build(self, part: parts.PartName, weights: parts.Weights, spec: ModelSpec | None = None) -> ov.Model:
        return parts.build(part, spec or self.spec, weights, Store("fp32"))

    def _window(self, layers: range) -> ov.Model:
        """Some layers of the decoder: (T, hidden) → (T, hidden), or logits where they are the last."""
        spec, true = self.spec.decoder, self.weights["decoder"]
        is_last = layers.stop == spec.num_layers
        small = msgspec.structs.replace(
            spec, num_layers=len(layers), vocab_size=spec.vocab_size if is_last else 1, tied=spec.tied and is_last
        )

        def weight(name: str) -> Held:
            if name == "lm_head.weight" and not is_last:
                return np.zeros((1, spec.hidden), np.float32)
            return true(_shifted(name, layers.start))

        whole = msgspec.structs.replace(self.spec, decoder=small)
        model = self._build("decoder", {"decoder": weight}, whole)
        return model if is_last else _ending_at(model, residual_name(len(layers) - 1))

    def _open(self, model: ov.Model) -> Executable:
        """Through a file, as every part is opened: its weights stay on disk where the runtime has its own copy."""
        with tempfile.TemporaryDirectory(prefix="triptych-twin-") as folder:
            path = Path(folder) / "twin.xml"
            ov.save_model(model, path, compress_to_fp16=False)
            del model
            return backend.open_part(path, EXACT)


def encode(vision: Executable, tiles: NDArray[np.uint8]) -> Rows:
    """Features of all tiles, a few at a time."""
    batches = [tiles[start : start + TILES_AT_ONCE] for start in range(0, len(tiles), TILES_AT_ONCE)]
    return np.concatenate([vision({"pixels": batch})["features"] for batch in batches])


def decode(decoder: Executable, embeddings: Rows, sampled: Positions) -> Rows:
    """What a plain decoder makes of some positions of one sequence."""
    position_ids = np.arange(len(embeddings))
    (out,) = decoder({"embeddings": embeddings, "position_ids": position_ids, "sampled": sampled}).values()
    return out


def _windows(spec: DecoderSpec, window_bytes: int) -> Iterator[range]:
    projections = 2 * spec.num_heads + 2 * spec.num_kv_heads
    layer_bytes = 4 * spec.hidden * (projections * spec.head_dim + 3 * spec.intermediate)
    at_once = max(1, window_bytes // layer_bytes)
    return (range(start, min(start + at_once, spec.num_layers)) for start in range(0, spec.num_layers, at_once))


def _shifted(name: str, by: int) -> str:
    """A window's own name of a tensor to the whole decoder's."""
    if not name.startswith("layers."):
        return name
    _, index, rest = name.split(".", 2)
    return f"layers.{int(index) + by}.{rest}"


def _ending_at(model: ov.Model, name: str) -> ov.Model:
    node = next(node for node in model.get_ordered_ops() if node.get_friendly_name() == name)
    return ov.Model([op.result(node.output(0))], model.get_parameters(), "window")
