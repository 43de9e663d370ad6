"""What a step asks of the decoder: rows of text and of pictures in, logits out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import PagedDecoder
from triptych.core.spec import Modality
from triptych.core.stages import StageClock
from triptych.core.table import Table
from triptych.engine.encoder import Encoder, Tower
from triptych.engine.evict.evictor import Evictor
from triptych.engine.features import Features
from triptych.engine.scheduler import Work
from triptych.engine.sequence import Sequence
from triptych.media.registry import BASE, modality_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a step's logits are for. logits: (num_due, vocab), a row each for the next token of `due`.

    scored: sequences whose prompts get probabilities, with places (n,) and the logits after each of them (n, vocab).
    """

    due: list[Work]
    logits: NDArray[np.float32]
    scored: list[tuple[Sequence, NDArray[np.int64], NDArray[np.float32]]]


class Runner:
    """The model's parts, open, and what a step needs of them."""

    def __init__(
        self,
        decoder: PagedDecoder,
        table: Table,
        towers: Mapping[Modality, Tower],
        features: Features,
        evictor: Evictor | None = None,
    ) -> None:
        """`evictor`: for a decoder whose layers forget apart, and for no other."""
        self.features = features
        self.clock = StageClock()
        self.encoder = Encoder(towers, table, self.clock)
        self.corrupted = 0  # sequences whose logits were no numbers
        self.evictor = evictor
        self._decoder = decoder
        self._table = table

    def decode(self, works: tuple[Work, ...]) -> Decoded:
        """Compute the works' tokens."""
        started = time.perf_counter()
        due = [work for work in works if work.is_last]
        scored = [(work, places) for work in works if len(places := work.sequence.scored_in(work.start, work.end))]
        arrays = self._arrays(works, scored)
        out = self._decoder(arrays)
        if self.evictor is not None:
            self.evictor.observe([work.sequence for work in works], arrays["subsequence_begins"], out)
        is_prefill = len(arrays["position_ids"]) > len(works)
        self.clock.add("prefill" if is_prefill else "decode", _modality(works), time.perf_counter() - started)
        logits = out["logits"]
        ends = len(due) + np.cumsum([len(places) for _, places in scored])
        return Decoded(
            due=due,
            logits=logits[: len(due)],
            scored=[
                (work.sequence, places, logits[end - len(places) : end])
                for (work, places), end in zip(scored, ends.tolist(), strict=True)
            ],
        )

    # ── decoding ───────────────────────────────────────────────────────────────────────────────────────────────

    def _arrays(self, works: tuple[Work, ...], scored: Many[tuple[Work, NDArray[np.int64]]]) -> dict[str, NDArray[Any]]:
        """The paged decoder's inputs (`backends/base.PagedDecoder`, or `LayeredDecoder`)."""
        counts = np.array([work.num_tokens for work in works])
        begins = np.concatenate([[0], np.cumsum(counts)])
        ends = begins[1:][[work.is_last for work in works]] - 1
        first = {id(work): begin for work, begin in zip(works, begins, strict=False)}
        return self._tables(works, begins) | {
            "embeddings": self._embed(works, begins),
            "position_ids": np.concatenate([self._positions(work) for work in works]),
            "subsequence_begins": begins.astype(np.int32),
            "sampled": np.concatenate([ends, *(places - work.start + first[id(work)] for work, places in scored)]),
        }

    def _tables(self, works: tuple[Work, ...], begins: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Where each sequence's keys and values lie, and how many there are."""
        if self.evictor is not None:
            return self.evictor.inputs([work.sequence for work in works], begins)
        blocks = [work.sequence.blocks for work in works]
        return {
            "past_lens": np.array([work.start for work in works], np.int32),
            "block_indices": np.concatenate(blocks).astype(np.int32),
            "block_indices_begins": np.concatenate([[0], np.cumsum([len(own) for own in blocks])]).astype(np.int32),
            "max_context_len": np.array(max(work.end for work in works), np.int32),
        }

    def _positions(self, work: Work) -> NDArray[np.int64]:
        """Where each of the work's tokens stands: where it stood before any reduction."""
        request = work.sequence.request
        if request.positions is None:
            return np.arange(work.start, work.end)
        begin = min(work.start, len(request.positions))
        prompt = request.positions[begin : work.end].astype(np.int64)
        for span in work.sequence.spans_in(work.start, work.end):
            start, end = max(span.start, work.start), min(span.end, work.end)
            rows = request.token_ids[start:end] - BASE[span.modality]
            kept = self.features.kept(span.digest)
            prompt[start - work.start : end - work.start] += rows if kept is None else kept[rows]
        answer = np.arange(work.start + len(prompt), work.end)
        return np.concatenate([prompt, answer + request.num_positions - len(request.positions)])

    def _embed(self, works: tuple[Work, ...], begins: NDArray[np.int64]) -> NDArray[np.float32]:
        """Text ids by the table, media ids by their item's rows."""
        ids = np.concatenate([work.sequence.tokens[work.start : work.end] for work in works])
        embeddings = self._table(np.where(modality_of(ids) == Modality.TEXT, ids, 0))
        for work, begin in zip(works, begins, strict=False):
            for span in work.sequence.spans_in(work.start, work.end):
                start, end = max(span.start, work.start), min(span.end, work.end)
                place = slice(begin + start - work.start, begin + end - work.start)
                embeddings[place] = self.features.rows(span.digest)[ids[place] - BASE[span.modality]]
        return embeddings


def _modality(works: tuple[Work, ...]) -> Modality:
    """What a step's time is booked under: pictures as soon as one of its chunks shows one."""
    has_image = any(work.sequence.spans_in(work.start, work.end) for work in works)
    return Modality.IMAGE if has_image else Modality.TEXT
