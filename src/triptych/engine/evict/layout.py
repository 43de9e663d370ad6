"""Where a sequence that has forgotten keeps its rows, layer by layer.

Blocks are counted whole; a block is one page for each layer. A sequence that forgets different numbers of tokens in
different layers deals its blocks' pages out as they need them, so two layers that keep half free one block in two:

    blocks 4, 9   before: layer 0 has pages 4·2, 9·2 and layer 1 has 4·2+1, 9·2+1        (2 layers, 64 rows each)
    block 4       after:  layer 0 has page 4·2       and layer 1 has 4·2+1, block 9 is free         (32 rows each)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import BLOCK_TOKENS

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Deal:
    """Which page of a block is a layer's: of `size` layers whose caches share a device it is the `rank`-th."""

    groups: tuple[Ints, ...]  # the layers on each device
    size: Ints  # (layers,)
    rank: Ints

    @classmethod
    def over(cls, num_layers: int, devices: Sequence[str] = ()) -> Deal:
        """`devices`: one a layer, as `KVPolicy.devices`; empty: all on one."""
        places = np.array(devices or [""] * num_layers)
        groups = tuple(np.flatnonzero(places == place) for place in dict.fromkeys(places.tolist()))
        size, rank = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64)
        for group in groups:
            size[group], rank[group] = len(group), np.arange(len(group))
        return cls(groups, size, rank)

    @property
    def num_layers(self) -> int:
        return len(self.size)

    def pages(self, blocks: Sequence[int]) -> Ints:
        """The layers' pages of blocks that are not dealt out otherwise: (layers, blocks)."""
        pages: Ints = np.asarray(blocks, np.int64) * self.size[:, None] + self.rank[:, None]
        return pages

    def num_blocks(self, lengths: Ints) -> int:
        """Blocks whose pages, dealt out, hold as many rows of each layer."""
        pages = pages_for(lengths)
        return max(-(-int(pages[group].sum()) // len(group)) for group in self.groups)


class Layout:
    """The rows of one sequence that has forgotten some of its first `border` tokens; all later ones are there."""

    def __init__(self, deal: Deal, kept: Sequence[Ints], border: int) -> None:
        """kept: for each layer the tokens that stay, ascending, all below `border`."""
        self.kept = kept
        self.border = border
        self.table: Ints = np.zeros((deal.num_layers, 0), np.int64)  # (layers, widest): a layer's last page repeats
        self._deal = deal
        self._num_kept = np.array([len(tokens) for tokens in kept])
        self._num_pages = np.zeros(deal.num_layers, np.int64)
        self._spare: list[list[int]] = [[] for _ in deal.groups]  # pages that no layer has yet

    def lengths(self, num_computed: int) -> Ints:
        """Rows of each layer, (layers,), once the sequence's first `num_computed` tokens are computed."""
        lengths: Ints = self._num_kept + (num_computed - self.border)
        return lengths

    def tokens(self, layer: int, num_computed: int) -> Ints:
        """Which token each row of a layer is."""
        return np.concatenate([self.kept[layer], np.arange(self.border, num_computed)])

    def num_blocks(self, num_computed: int) -> int:
        """Blocks that the sequence needs in all, for that many tokens."""
        return self._deal.num_blocks(self.lengths(num_computed))

    def grow(self, blocks: Sequence[int], num_computed: int) -> None:
        """Take these blocks, and deal pages out until every layer has room for `num_computed` tokens."""
        pages = self._deal.pages(blocks)
        need = pages_for(self.lengths(num_computed))
        more = need - self._num_pages
        if int(need.max()) > self.table.shape[1]:
            wider = int(need.max()) - self.table.shape[1]
            self.table = np.pad(self.table, ((0, 0), (0, wider)), mode="edge" if self.table.size else "constant")
        for spare, group in zip(self._spare, self._deal.groups, strict=True):
            spare += pages[group].ravel().tolist()
            for layer in group[more[group] > 0]:
                first, self._num_pages[layer] = self._num_pages[layer], need[layer]
                own, spare[:] = spare[: more[layer]], spare[more[layer] :]
                self.table[layer, first : need[layer]] = own
                self.table[layer, need[layer] :] = own[-1]

    def slots(self, layer: int, rows: Ints) -> Ints:
        """Where rows of a layer lie in its device's pool."""
        return slots_of(self.table[layer], rows)


def slots_of(table: Ints, rows: Ints) -> Ints:
    """Slots of rows under a layer's block table."""
    slots: Ints = table[rows // BLOCK_TOKENS] * BLOCK_TOKENS + rows % BLOCK_TOKENS
    return slots


def pages_for(num_rows: Ints) -> Ints:
    pages: Ints = -(-num_rows // BLOCK_TOKENS)
    return pages
