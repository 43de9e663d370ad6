"""Encode what is missing, decode the step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import Executable, PagedDecoder
from triptych.core.request import Patches
from triptych.core.spec import Modality
from triptych.core.table import Table
from triptych.engine.evict.evictor import Evictor
from triptych.engine.features import Features, Rows
from triptych.engine.scheduler import Step, Work
from triptych.engine.sequence import Sequence
from triptych.errors import BackendError
from triptych.media.reduce import reduce
from triptych.media.registry import BASE, modality_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder and its projector, opened on first need; max_tiles go through them at once."""

    open_encoder: Callable[[], Executable]
    open_projector: Callable[[], Executable]
    max_tiles: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a step's logits are for. logits: (num_due, vocab), a row each for the next token of `due`.

    scored: sequences whose prompts get probabilities, with places (n,) and the logits after each of them (n, vocab).
    """

    due: list[Work]
    logits: NDArray[np.float32]
    scored: list[tuple[Sequence, NDArray[np.int64], NDArray[np.float32]]]


class StageClock:
    """Seconds and calls of each (stage, modality)."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)

    def add(self, stage: str, modality: Modality, seconds: float) -> None:
        key = (stage, modality.name.lower())
        self.seconds[key] += seconds
        self.calls[key] += 1


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
        self.corrupted = 0
        self.evictor = evictor
        self._decoder = decoder
        self._table = table
        self._towers = towers
        self._open: dict[Modality, tuple[Executable, Executable]] = {}

    @property
    def open_towers(self) -> frozenset[Modality]:
        return frozenset(self._open)

    def place(self, modality: Modality) -> tuple[str, str]:
        """Where a tower's encoder and projector really run; opens them."""
        encoder, projector = self._opened(modality)
        return encoder.place(), projector.place()

    def encode(self, step: Step) -> dict[str, Exception]:
        """Have every item of the step in `features`, held by the sequences that show it.

        Returns what went wrong, by digest; the items that failed are neither kept nor held.
        """
        started = time.perf_counter()
        failed = self._fill(step.encode)
        seconds = time.perf_counter() - started
        missing = {patches.digest for patches in step.encode}
        for work in step.works:
            if work.sequence.request.spans:
                self._hold(work, missing, failed, seconds)
        self.features.shrink()
        return failed

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

    # ── encoding ───────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, items: Many[Patches]) -> dict[str, Exception]:
        """Encode the items together; if that fails, each alone, so that one cannot take the others with it."""
        failed: dict[str, Exception] = {}
        by_digest = {item.digest: item for item in items}
        try:
            encoded = self._encode(items)
        except Exception as error:
            if len(items) == 1:
                return {items[0].digest: error}
            for item in items:
                failed |= self._fill([item])
            return failed
        for digest, rows in encoded:
            if np.isfinite(rows).all():
                self._put(by_digest[digest], rows)
            else:
                self.corrupted += 1
                failed[digest] = BackendError(f"the encoder gave NaN or infinity for picture {digest[:12]}")
        return failed

    def _put(self, item: Patches, rows: Rows) -> None:
        """Keep an item's rows, or what its reduction leaves of them."""
        if item.reduction.is_whole:
            self.features.put(item.digest, rows)
            return
        started = time.perf_counter()
        reduced = reduce(item, rows, self._table(item.question))
        self.clock.add("reduce", item.modality, time.perf_counter() - started)
        self.features.put(item.digest, reduced.rows, reduced.kept)

    def _hold(self, work: Work, missing: set[str], failed: Mapping[str, Exception], seconds: float) -> None:
        sequence = work.sequence
        new = [patches.digest for patches in sequence.patches_in(work.start, work.end)]
        new = [digest for digest in new if digest not in sequence.held and digest not in failed]
        if new:
            misses = len(missing.intersection(new))
            missing.difference_update(new)  # whoever comes first is the one it was encoded for
            self.features.hold(new, misses=misses)
            sequence.held += new
            sequence.encoded(hits=len(new) - misses, misses=misses, seconds=seconds if misses else 0.0)

    def _encode(self, items: Many[Patches]) -> list[tuple[str, Rows]]:
        """Items of one modality at a time, their tiles batched across items, each getting its own rows back."""
        done: list[tuple[str, Rows]] = []
        for modality in dict.fromkeys(item.modality for item in items):
            own = [item for item in items if item.modality is modality]
            rows, extra = self._project(np.concatenate([item.tiles for item in own]), modality)
            first = 0
            for item in own:
                mine = rows[first : first + len(item.tiles)].reshape(-1, rows.shape[-1])
                first += len(item.tiles)
                done.append((item.digest, np.concatenate([mine, extra])[item.take]))
        return done

    def _project(self, tiles: NDArray[np.uint8], modality: Modality) -> tuple[Rows, Rows]:
        """(num_tiles, tokens, hidden) rows, and the projector's constants (num_extra, hidden)."""
        encoder, projector = self._opened(modality)
        batch = self._towers[modality].max_tiles
        parts: list[Rows] = []
        extra: Rows | None = None
        for start in range(0, len(tiles), batch):
            began = time.perf_counter()
            features = encoder({"pixels": tiles[start : start + batch]})["features"]
            encoded = time.perf_counter()
            out = projector({"features": features})
            self.clock.add("encode", modality, encoded - began)
            self.clock.add("project", modality, time.perf_counter() - encoded)
            parts.append(out["embeddings"])
            extra = out.get("extra")
        rows = np.concatenate(parts)
        return rows, np.empty((0, rows.shape[-1]), np.float32) if extra is None else extra

    def _opened(self, modality: Modality) -> tuple[Executable, Executable]:
        if modality not in self._open:
            tower = self._towers[modality]
            self._open[modality] = tower.open_encoder(), tower.open_projector()
        return self._open[modality]

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
