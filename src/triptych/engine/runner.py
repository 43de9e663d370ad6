"""What a step asks of the decoder: rows of text and of pictures in, logits out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
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
from triptych.media.registry import BASE, IMAGE_BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a step's logits are for. logits: of each of `due` (1 + num_drafted, vocab), for its next tokens.

    scored: sequences whose prompts get probabilities, with places (n,) and the logits after each of them (n, vocab).
    """

    due: list[Work]
    logits: list[NDArray[np.float32]]
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
        is_prefill = any(work.num_tokens > 1 for work in works)
        self.clock.add("prefill" if is_prefill else "decode", _modality(works), time.perf_counter() - started)
        counts = [*(1 + work.num_drafted for work in due), *(len(places) for _, places in scored)]
        ends = itertools.accumulate(counts)
        logits = [out["logits"][end - count : end] for count, end in zip(counts, ends, strict=True)]
        pairs = zip(scored, logits[len(due) :], strict=True)
        return Decoded(
            due=due,
            logits=logits[: len(due)],
            scored=[(work.sequence, places, own) for (work, places), own in pairs],
        )

    # ── decoding ───────────────────────────────────────────────────────────────────────────────────────────────

    def _arrays(self, works: tuple[Work, ...], scored: Many[tuple[Work, NDArray[np.int64]]]) -> dict[str, NDArray[Any]]:
        """The paged decoder's inputs (`backends/base.PagedDecoder`, or `LayeredDecoder`)."""
        begins = [0, *itertools.accumulate(work.num_rows for work in works)]
        sampled = [
            row
            for work, end in zip(works, begins[1:], strict=True)
            if work.is_last
            for row in range(end - 1 - work.num_drafted, end)
        ]
        for work, places in scored:
            sampled += (places - work.start + begins[works.index(work)]).tolist()
        apart = [part for work in works for part in (_apart(work) if work.is_apart else (work,))]
        return self._tables(apart) | {
            "embeddings": self._embed(works, begins),
            "position_ids": np.concatenate([self._positions(work) for work in works]),
            "sampled": np.array(sampled, np.int64),
        }

    def _tables(self, works: Many[Work]) -> dict[str, NDArray[Any]]:
        """Which rows are whose, where each sequence's keys and values lie, and how many there are."""
        begins = np.array([0, *itertools.accumulate(work.num_rows for work in works)])
        if self.evictor is not None:
            tables = self.evictor.inputs([work.sequence for work in works], begins)
            return tables | {"subsequence_begins": begins.astype(np.int32)}
        blocks = [work.sequence.blocks for work in works]
        return {
            "subsequence_begins": begins.astype(np.int32),
            "past_lens": np.array([work.start for work in works], np.int32),
            "block_indices": np.fromiter(itertools.chain.from_iterable(blocks), np.int32),
            "block_indices_begins": np.array([0, *itertools.accumulate(map(len, blocks))], np.int32),
            "max_context_len": np.array(max(work.start + work.num_rows for work in works), np.int32),
        }

    def _positions(self, work: Work) -> NDArray[np.int64]:
        """Where each of the work's rows stands: where it stood before any reduction."""
        request, stop = work.sequence.request, work.start + work.num_rows
        if request.positions is None:
            return np.arange(work.start, stop)
        begin = min(work.start, len(request.positions))
        prompt = request.positions[begin:stop].astype(np.int64)
        for span in work.sequence.spans_in(work.start, work.end):
            start, end = max(span.start, work.start), min(span.end, work.end)
            rows = request.token_ids[start:end] - BASE[span.modality]
            kept = self.features.kept(span.digest)
            prompt[start - work.start : end - work.start] += rows if kept is None else kept[rows]
        answer = np.arange(work.start + len(prompt), stop)
        return np.concatenate([prompt, answer + request.num_positions - len(request.positions)])

    def _embed(self, works: tuple[Work, ...], begins: Many[int]) -> NDArray[np.float32]:
        """Text ids by the table, media ids by their item's rows."""
        ids = np.concatenate([work.sequence.ahead(work.start, work.start + work.num_rows) for work in works])
        embeddings = self._table(np.where(ids < IMAGE_BASE, ids, 0))
        for work, begin in zip(works, begins, strict=False):
            for span in work.sequence.spans_in(work.start, work.end):
                start, end = max(span.start, work.start), min(span.end, work.end)
                place = slice(begin + start - work.start, begin + end - work.start)
                embeddings[place] = self.features.rows(span.digest)[ids[place] - BASE[span.modality]]
        return embeddings


def _apart(work: Work) -> Iterator[Work]:
    """The same with each token in a work of its own: all see the same pages, each up to its own place."""
    for place in range(work.start, work.start + work.num_rows):
        yield Work(sequence=work.sequence, start=place, num_tokens=1)


def _modality(works: tuple[Work, ...]) -> Modality:
    """What a step's time is booked under: pictures as soon as one of its chunks shows one."""
    has_image = any(work.sequence.spans_in(work.start, work.end) for work in works)
    return Modality.IMAGE if has_image else Modality.TEXT
