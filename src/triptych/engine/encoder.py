"""Pictures to rows, beside the steps of the decoder."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import Executable
from triptych.core.request import Patches
from triptych.core.spec import Modality
from triptych.core.stages import StageClock
from triptych.core.table import Table
from triptych.engine.features import Kept, Rows
from triptych.errors import BackendError, unwound
from triptych.media.reduce import reduce

log = logging.getLogger("triptych.engine")

Parts = tuple[Executable, Executable]  # encoder, projector


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder and its projector, opened on first need; a call has max_tiles at most.

    side_by_side: copies with a tile each; a call with fewer tiles leaves some idle. open_exact: the same in 32-bit
    floats, for pictures that overflow; None where they are that already.
    """

    open_parts: Callable[[], Parts]
    max_tiles: int
    side_by_side: int = 1
    open_exact: Callable[[], Parts] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What became of one item. kept: as `Features` has it."""

    digest: str
    rows: Rows | None = None
    kept: Kept | None = None
    error: Exception | None = None
    num_tiles: int = 0
    seconds: float = 0.0


class Encoder:
    """One batch of items at a time. Until it is started, `begin` itself encodes.

    Beside the decoder, not between its steps: a tower that takes seconds holds no answer up, and a tower on a device
    of its own costs the answers nothing at all.
    """

    def __init__(self, towers: Mapping[Modality, Tower], table: Table, clock: StageClock) -> None:
        self.corrupted = 0  # items
        self.recomputed = 0  # items that were finite in 32-bit floats only
        self.begun_s: float | None = None  # of the item under way, on time.monotonic
        self._towers = towers
        self._table = table
        self._clock = clock
        self._open: dict[tuple[Modality, bool], Parts] = {}
        self._opening = threading.Lock()
        self._batches: SimpleQueue[deque[Patches] | None] = SimpleQueue()
        self._finished: deque[Encoded] = deque()
        self._thread: threading.Thread | None = None

    # ── the engine's thread ────────────────────────────────────────────────────────────────────────────────────

    def start(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the encoder's thread whenever an item has finished."""
        self._thread = threading.Thread(target=self._serve, args=(wake,), name="triptych-encoder", daemon=True)
        self._thread.start()

    def begin(self, items: Sequence[Patches]) -> None:
        """Encode these; what became of them is in `finished` later. The one before has finished."""
        self.begun_s = time.monotonic()
        if self._thread is None:
            self._work(deque(items), wake=lambda: None)
        else:
            self._batches.put(deque(items))

    def finished(self) -> list[Encoded]:
        """What has become of items since the last call."""
        done = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    def close(self) -> None:
        """End the thread once the batch under way has finished."""
        if self._thread is not None:
            self._batches.put(None)
            self._thread.join()
            self._thread = None

    # ── any thread ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def open_towers(self) -> frozenset[Modality]:
        return frozenset(modality for modality, _ in list(self._open))

    def place(self, modality: Modality) -> tuple[str, str]:
        """Where a tower's encoder and projector really run; opens them."""
        encoder, projector = self._opened(modality)
        return encoder.place(), projector.place()

    # ── its own thread ─────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self, wake: Callable[[], None]) -> None:
        while (items := self._batches.get()) is not None:
            self._work(items, wake)

    def _work(self, items: deque[Patches], wake: Callable[[], None]) -> None:
        ahead: list[Rows] = []
        while items:
            self.begun_s = time.monotonic()
            ahead = self._finish(items.popleft(), ahead, items)  # its tiles are held here no longer
            wake()
        self.begun_s = None

    def _finish(self, item: Patches, ahead: list[Rows], others: Sequence[Patches]) -> list[Rows]:
        """Encode one; returns the features of the next one's first tiles, as far as they went along."""
        began, seen = time.perf_counter(), list[Rows]()
        try:
            self._opened(item.modality)
            began = time.perf_counter()
            seen = self._features(item, ahead, others[0] if others else None)
            done = self._encode(item, seen[: len(item.tiles)])
        except Exception as error:
            log.error("a picture was not encoded", exc_info=error)
            done = Encoded(digest=item.digest, error=unwound(error))
        seconds = time.perf_counter() - began
        self._finished.append(replace(done, num_tiles=len(item.tiles), seconds=seconds))
        return seen[len(item.tiles) :]

    def _features(self, item: Patches, ahead: list[Rows], after: Patches | None) -> list[Rows]:
        """(tokens, width) of each tile; of the first ones they are there already, `ahead`.

        Tiles of the item `after` it go along where copies would be idle, and come last. Still each item is by itself:
        its rows have the same bits, and it the same fate, whatever is encoded with it.
        """
        tower, rest = self._towers[item.modality], item.tiles[len(ahead) :]
        if after is None or after.modality is not item.modality:
            return ahead + self._see(rest, item.modality)
        lent = after.tiles[: -len(rest) % tower.side_by_side]
        try:
            return ahead + self._see(np.concatenate([rest, lent]), item.modality)
        except Exception:
            return self._features(item, ahead, None)

    def _encode(self, item: Patches, features: list[Rows]) -> Encoded:
        """An item's rows, or what its reduction leaves of them; once more in 32-bit floats if they are no numbers."""
        rows = self._rows(item, features)
        if not np.isfinite(rows).all():
            if self._towers[item.modality].open_exact is not None:
                rows = self._rows(item, self._see(item.tiles, item.modality, exactly=True), exactly=True)
            if not np.isfinite(rows).all():
                self.corrupted += 1
                message = f"the encoder gave NaN or infinity for picture {item.digest[:12]}"
                return Encoded(digest=item.digest, error=BackendError(message, hint="send another picture"))
            self.recomputed += 1
        if item.reduction.is_whole:
            return Encoded(digest=item.digest, rows=rows)
        with self._clock.time("reduce", item.modality):
            reduced = reduce(item, rows, self._table(item.question))
        return Encoded(digest=item.digest, rows=reduced.rows, kept=reduced.kept)

    def _see(self, tiles: NDArray[np.uint8], modality: Modality, *, exactly: bool = False) -> list[Rows]:
        """(tokens, width) features of each tile."""
        (encoder, _), most = self._opened(modality, exactly=exactly), self._towers[modality].max_tiles
        seen: list[Rows] = []
        for start in range(0, len(tiles), most):
            with self._clock.time("encode", modality):
                seen.extend(encoder({"pixels": tiles[start : start + most]})["features"])
        return seen

    def _rows(self, item: Patches, features: list[Rows], *, exactly: bool = False) -> Rows:
        """What stands in the prompt, (num_tokens, hidden): of its tiles' rows and the projector's constants."""
        (_, projector), most = self._opened(item.modality, exactly=exactly), self._towers[item.modality].max_tiles
        outs: list[dict[str, Rows]] = []
        for start in range(0, len(features), most):
            with self._clock.time("project", item.modality):
                outs.append(projector({"features": np.stack(features[start : start + most])}))
        rows = np.concatenate([out["embeddings"] for out in outs])
        rows = rows.reshape(-1, rows.shape[-1])
        taken: Rows = np.concatenate([rows, outs[-1].get("extra", rows[:0])])[item.take]
        return taken

    def _opened(self, modality: Modality, *, exactly: bool = False) -> Parts:
        with self._opening:
            if (modality, exactly) not in self._open:
                tower = self._towers[modality]
                opening = tower.open_exact if exactly else tower.open_parts
                assert opening is not None
                self._open[modality, exactly] = opening()
            return self._open[modality, exactly]
