"""The Executable contract: named arrays in, named arrays out, for one part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ComputeType = Literal["auto", "float", "bfloat16", "half"]
CacheType = Literal["f32", "bf16", "u8", "u4"]
BLOCK_TOKENS = 32  # of a paged decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how a part runs. `device` is `cpu:N`, `gpu:N` or `npu:N`, as OpenVINO numbers them."""

    device: str = "cpu:0"
    compute: ComputeType = "auto"  # arithmetic, not storage; auto: the device's own choice
    num_threads: int | None = None  # None: all that the process may use


class Executable(Protocol):
    """One open part.

    vision:    pixels (num_tiles, size, size, 3) uint8 → features (num_tiles, tokens, width) f32
    projector: features as above → embeddings (num_tiles, tokens_out, hidden) f32, and for a family with
               constants of its own, extra (num_extra, hidden) f32
    decoder:   see `PagedDecoder`
    """

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. The arrays returned are the caller's to keep. Raises BackendError."""

    def place(self) -> str:
        """Where it really runs, in the runtime's words, e.g. `CPU (AMD EPYC), bf16`."""


class PagedDecoder(Executable, Protocol):
    """A decoder over pages of KV cache that it owns.

    in:  embeddings (T, hidden) f32, position_ids (T,) i64, past_lens (S,) i32, subsequence_begins (S+1,) i32,
         block_indices (B,) i32, block_indices_begins (S+1,) i32, max_context_len () i32, sampled (R,) i64
    out: logits (R, vocab) f32: rows `sampled` of T, and no others, reach the LM head; they lie where the next call
         writes its own
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one 32-token block over all layers, keys and values."""

    def allocate(self, num_blocks: int) -> None:
        """Make `num_blocks` pages; called once, before the first call."""


class LayeredDecoder(PagedDecoder, Protocol):
    """A paged decoder whose layers forget apart: each has a length and a block table of its own, over shared pages.

    A block is one page a layer: of the n layers on one device the i-th has page `block * n + i` of that device's pool,
    until a sequence that forgot deals its blocks' pages out otherwise. A row of a pool is a slot, `page * 32 + row`.

    in: as `PagedDecoder`, but past_lens (L, S) and block_indices (L, B) are pages. `block_indices_begins` (S+1,) holds
    for all layers: a shorter table is filled up with pages that nobody reads.
    Where it was opened for queries, also watched (W,) i64, rows of T; none if left out.
    out: logits, and queries (L, W, heads, head_dim) f32 of the rows watched, after RoPE
    """

    @property
    def num_layers(self) -> int: ...

    def allocate(self, num_blocks: int, devices: Sequence[str] = ()) -> None:
        """`devices`: where each layer's cache lies; empty: all beside the decoder. Raises ConfigError, BackendError."""

    def read(self, layer: int, pages: NDArray[np.int64], num_rows: int) -> tuple[Array, Array]:
        """A layer's keys, rotated, and values as attention sees them, (heads, num_rows, head_dim) f32 each."""

    def move(self, sources: Sequence[NDArray[np.int64]], targets: Sequence[NDArray[np.int64]]) -> None:
        """Copy rows, a layer's slots to others of the same layer. All are read before any is written."""
