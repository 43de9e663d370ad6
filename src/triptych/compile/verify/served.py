"""Run prompts as the engine will: several at once, in chunks, over pages of cache that lie in no order.

A shifted position, a wrong page or a chunk edge that changes something shows in the logits, for they are held
against the plain decoder's, which knows neither pages nor chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import Array, PagedDecoder

BLOCK_TOKENS = 32
CHUNK_TOKENS = (33, 1, 40, 7, 64)  # in turn: across page edges, on them, and one token as in an answer

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of one prompt in one step. blocks: the prompt's pages up to its end."""

    prompt: int
    start: int
    end: int
    blocks: NDArray[np.int32]


def logits(decoder: PagedDecoder, prompts: Sequence[Rows], chunk_tokens: Sequence[int] = CHUNK_TOKENS) -> list[Rows]:
    """Embeddings of each prompt, (T, hidden), to logits of each of its positions. Makes the decoder's cache."""
    counts = [-(-len(prompt) // BLOCK_TOKENS) for prompt in prompts]
    shuffled = np.random.default_rng(32).permutation(sum(counts)).astype(np.int32)
    pages = np.split(shuffled, np.cumsum(counts)[:-1])
    decoder.allocate(sum(counts))
    found: list[list[Rows]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    chunks = cycle(chunk_tokens)
    while any(start < len(prompt) for start, prompt in zip(done, prompts, strict=True)):
        pieces = _next_pieces(prompts, done, pages, chunks)
        out = decoder(step(pieces, prompts))["logits"]
        for piece in pieces:
            found[piece.prompt].append(out[: piece.end - piece.start])
            out = out[piece.end - piece.start :]
            done[piece.prompt] = piece.end
    return [np.concatenate(rows) for rows in found]


def step(pieces: Sequence[Piece], prompts: Sequence[Rows]) -> Mapping[str, Array]:
    """One call's inputs (`backends/base.PagedDecoder`), with every row sampled."""
    lens = [piece.end - piece.start for piece in pieces]
    return {
        "embeddings": np.concatenate([prompts[piece.prompt][piece.start : piece.end] for piece in pieces]),
        "position_ids": np.concatenate([np.arange(piece.start, piece.end) for piece in pieces]),
        "past_lens": np.array([piece.start for piece in pieces], np.int32),
        "subsequence_begins": np.array([0, *np.cumsum(lens)], np.int32),
        "block_indices": np.concatenate([piece.blocks for piece in pieces]),
        "block_indices_begins": np.array([0, *np.cumsum([len(piece.blocks) for piece in pieces])], np.int32),
        "max_context_len": np.array(max(piece.end for piece in pieces), np.int32),
        "sampled": np.arange(sum(lens)),
    }


def _next_pieces(
    prompts: Sequence[Rows], done: Sequence[int], pages: Sequence[NDArray[np.int32]], chunks: Iterator[int]
) -> list[Piece]:
    """One piece of every prompt that is not through, each of its own length."""
    pieces = []
    for index, (prompt, start) in enumerate(zip(prompts, done, strict=True)):
        end = min(len(prompt), start + next(chunks))
        if start < end:
            blocks = pages[index][: -(-end // BLOCK_TOKENS)]
            pieces.append(Piece(prompt=index, start=start, end=end, blocks=blocks))
    return pieces
