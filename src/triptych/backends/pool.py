"""Pages of keys or values in our own memory, as OpenVINO's paged attention writes and reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.backends.base import BLOCK_TOKENS, CacheType

Bytes = NDArray[np.uint8]
Float = NDArray[np.float32]
HEADER = 8  # bytes of scale and zero point, both f32, before each group of codes in u8 and u4
LINE = 64  # bytes: memory begins where a line of the processor's cache does


class Pool:
    """Pages of one kind on one device. A page holds 32 rows of every key/value head of one layer."""

    def __init__(self, num_pages: int, num_heads: int, row_bytes: int) -> None:
        shape = (num_pages, num_heads, BLOCK_TOKENS, row_bytes)
        size = int(np.prod(shape))
        raw = np.empty(size + LINE, np.uint8)
        start = -raw.ctypes.data % LINE
        self.pages: Bytes = raw[start : start + size].reshape(shape)

    def rows(self, slots: NDArray[np.int64]) -> Bytes:
        """A copy of rows: (n,) slots, `page * 32 + row`, → (n, heads, row_bytes)."""
        found: Bytes = self.pages[slots // BLOCK_TOKENS, :, slots % BLOCK_TOKENS]
        return found

    def put(self, slots: NDArray[np.int64], rows: Bytes) -> None:
        self.pages[slots // BLOCK_TOKENS, :, slots % BLOCK_TOKENS] = rows


def dequantize(rows: Bytes, cache: CacheType, head_dim: int) -> Float:
    """What attention computes with: (…, row_bytes) as stored → (…, head_dim).

    u8 and u4 rows are groups of (scale f32, zero point f32, codes), where value = (code - zero) * scale; of two u4
    codes in a byte the first is the high half.
    """
    if cache == "f32":
        return _as(rows, np.float32)
    if cache == "bf16":
        return _as(_as(rows, np.uint16).astype(np.uint32) << 16, np.float32)
    code_bytes = head_dim if cache == "u8" else head_dim // 2
    num_groups = (rows.shape[-1] - code_bytes) // HEADER
    groups = rows.reshape(*rows.shape[:-1], num_groups, -1)
    facts = _as(np.ascontiguousarray(groups[..., :HEADER]), np.float32)
    codes = groups[..., HEADER:]
    if cache == "u4":
        codes = np.stack([codes >> 4, codes & 15], axis=-1).reshape(*codes.shape[:-1], -1)
    values = codes.astype(np.float32)
    values -= facts[..., 1:]
    values *= facts[..., :1]
    return values.reshape(*rows.shape[:-1], head_dim)


def _as(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(dtype)
