"""Encoder outputs, cached by digest within a byte budget."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]  # (num_tokens, hidden): what stands in the prompt for one item
Kept = NDArray[np.int32]  # (num_tokens,): which of the whole item's rows each of them stands for


class Features:
    """Rows by digest. Held items stay; the others go, least recently used first, once the budget is passed.

    A sequence holds an item from the moment that it asks for it, be it encoded or not yet, until it has passed its
    last token. What is held may exceed the budget, so an item larger than the budget can still be served; it is only
    not kept.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.queries = 0
        self.hits = 0
        self._rows: OrderedDict[str, Rows] = OrderedDict()
        self._kept: dict[str, Kept] = {}  # of reduced items alone
        self._held: Counter[str] = Counter()

    def __contains__(self, digest: str) -> bool:
        return digest in self._rows

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def is_full(self) -> bool:
        """Whether what is held alone passes the budget."""
        return sum(self._rows[digest].nbytes for digest in self._held if digest in self._rows) > self.budget_bytes

    def rows(self, digest: str) -> Rows:
        """The rows of an item that is held and encoded."""
        return self._rows[digest]

    def kept(self, digest: str) -> Kept | None:
        """Which rows a reduced item stands for; None where it is whole."""
        return self._kept.get(digest)

    def hold(self, digests: Collection[str], *, misses: int) -> None:
        """Keep these, once they are there, until `release`; `misses` of them have to be encoded for it."""
        for digest in digests:
            self.queries += 1
            self._held[digest] += 1
            if digest in self._rows:
                self._rows.move_to_end(digest)
        self.hits += len(digests) - misses

    def put(self, digest: str, rows: Rows, kept: Kept | None = None) -> None:
        """Add an item that has just been encoded; if nobody holds it, until the next `release` or `shrink`."""
        if digest not in self._rows:
            self._rows[digest] = rows
            self.num_bytes += rows.nbytes
            if kept is not None:
                self._kept[digest] = kept

    def release(self, digests: Iterable[str]) -> None:
        """Undo one `hold` of each."""
        for digest in digests:
            self._held[digest] -= 1
            assert self._held[digest] >= 0, f"{digest[:12]} released twice"
            if not self._held[digest]:
                del self._held[digest]
        self.shrink()

    def clear(self) -> None:
        """Forget everything, held or not: those who held it are gone."""
        self._rows.clear()
        self._kept.clear()
        self._held.clear()
        self.num_bytes = 0

    def shrink(self) -> None:
        """Forget what nobody holds, oldest first, until the budget is kept."""
        if self.num_bytes <= self.budget_bytes:
            return
        for digest in [digest for digest in self._rows if digest not in self._held]:
            self.num_bytes -= self._rows.pop(digest).nbytes
            self._kept.pop(digest, None)
            if self.num_bytes <= self.budget_bytes:
                return
