"""A paged decoder that gives each row the same bits whoever is computed beside it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from triptych.backends.base import Array, PagedDecoder


class Steady:
    """Never computes one row alone: OpenVINO's CPU multiplies one row in another order than several.

    A step of one token gets a second one, on a page that nobody else has; a single row of logits is computed twice.
    From two rows on, results depend neither on their number nor on where prompts are cut (bench/steady.py).
    """

    def __init__(self, decoder: PagedDecoder) -> None:
        self._decoder = decoder
        self._spare = 0  # the page

    @property
    def block_bytes(self) -> int:
        return self._decoder.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self._spare = num_blocks
        self._decoder.allocate(num_blocks + 1)

    def place(self) -> str:
        return self._decoder.place()

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        num_rows = len(arrays["sampled"])
        if len(arrays["position_ids"]) == 1:
            arrays = self._beside_another(arrays)
        if num_rows == 1:
            arrays = {**arrays, "sampled": np.repeat(arrays["sampled"], 2)}
        out = self._decoder(arrays)
        return {**out, "logits": out["logits"][:num_rows]}

    def _beside_another(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        def more(name: str, value: int) -> Array:
            return np.append(arrays[name], np.asarray(value, arrays[name].dtype))

        return {
            **arrays,
            "embeddings": np.repeat(arrays["embeddings"], 2, axis=0),
            "position_ids": more("position_ids", 0),
            "past_lens": more("past_lens", 0),
            "subsequence_begins": more("subsequence_begins", 2),
            "block_indices": more("block_indices", self._spare),
            "block_indices_begins": more("block_indices_begins", len(arrays["block_indices"]) + 1),
        }
