"""Run prompts as the engine will: together, in chunks, over pages that lie in no order.

A shifted position, a wrong page or a chunk edge that changes something shows in the logits, for they are held
against the plain decoder's, which knows neither pages nor chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import BLOCK_TOKENS, Array, PagedDecoder

CHUNK_TOKENS = (33, 1, 40, 7, 64)  # in turn: across page edges, on them, and one token as in an answer

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One prompt. embeddings: (T, hidden); judged: the positions whose logits are wanted, in order."""

    embeddings: Rows
    judged: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def num_blocks(self) -> int:
        return -(-len(self) // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of one sequence in one step. blocks: the sequence's pages up to its end."""

    sequence: Sequence
    start: int
    end: int
    blocks: NDArray[np.int32]

    @property
    def sampled(self) -> NDArray[np.int64]:
        """Counted from the piece's start."""
        judged = self.sequence.judged
        return judged[(judged >= self.start) & (judged < self.end)] - self.start


def logits(
    decoder: PagedDecoder, sequences: Iterable[Sequence], chunk_tokens: tuple[int, ...] = CHUNK_TOKENS
) -> list[Rows]:
    """Of each sequence, the logits of its judged positions, (R, vocab). Makes the decoder's cache."""
    runs = [_Run(sequence=sequence) for sequence in sequences]
    _give_pages(decoder, runs)
    chunks = cycle(chunk_tokens)
    while any(run.is_open for run in runs):
        turn = [(run, run.next_piece(next(chunks))) for run in runs if run.is_open]
        out = decoder(step([piece for _, piece in turn]))["logits"].copy()
        for run, piece in turn:
            run.logits.append(out[: len(piece.sampled)])
            out = out[len(piece.sampled) :]
    return [np.concatenate(run.logits) for run in runs]


def step(pieces: list[Piece]) -> Mapping[str, Array]:
    """One call's inputs (`backends/base.PagedDecoder`)."""
    begins = np.array([0, *np.cumsum([piece.end - piece.start for piece in pieces])])
    return {
        "embeddings": np.concatenate([piece.sequence.embeddings[piece.start : piece.end] for piece in pieces]),
        "position_ids": np.concatenate([np.arange(piece.start, piece.end) for piece in pieces]),
        "past_lens": np.array([piece.start for piece in pieces], np.int32),
        "subsequence_begins": begins.astype(np.int32),
        "block_indices": np.concatenate([piece.blocks for piece in pieces]),
        "block_indices_begins": np.array([0, *np.cumsum([len(piece.blocks) for piece in pieces])], np.int32),
        "max_context_len": np.array(max(piece.end for piece in pieces), np.int32),
        "sampled": np.concatenate([begin + piece.sampled for begin, piece in zip(begins, pieces, strict=False)]),
    }


@dataclass(slots=True, kw_only=True)
class _Run:
    """A sequence on its way through the decoder."""

    sequence: Sequence
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    done: int = 0
    logits: list[Rows] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.done < len(self.sequence)

    def next_piece(self, num_tokens: int) -> Piece:
        start, self.done = self.done, min(len(self.sequence), self.done + num_tokens)
        blocks = self.pages[: -(-self.done // BLOCK_TOKENS)]
        return Piece(sequence=self.sequence, start=start, end=self.done, blocks=blocks)


def _give_pages(decoder: PagedDecoder, runs: list[_Run]) -> None:
    """Pages of one common cache, in no order."""
    ends = np.cumsum([run.sequence.num_blocks for run in runs])
    decoder.allocate(int(ends[-1]))
    shuffled = np.random.default_rng(32).permutation(ends[-1]).astype(np.int32)
    for run, pages in zip(runs, np.split(shuffled, ends[:-1]), strict=True):
        run.pages = pages
