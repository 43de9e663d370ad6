"""How low-bit numbers lie in memory: pack and unpack, nothing else.

Two 4-bit numbers share a byte, the earlier one in the low half, as OpenVINO and GGUF store them:

    byte 0        byte 1
    ├─ 1 ─┼─ 0 ─┤ ├─ 3 ─┼─ 2 ─┤     an odd count leaves the last high half zero
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NIBBLE_MAX = 15


def pack_nibbles(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Numbers in [0, 15], any shape, to ceil(size / 2) bytes. Raises ValueError on one out of range."""
    flat = np.ascontiguousarray(values, np.uint8).reshape(-1)
    if flat.size and flat.max() > NIBBLE_MAX:
        raise ValueError(f"4 bits hold 0 to {NIBBLE_MAX}, got {flat.max()}")
    low, high = flat[0::2], flat[1::2]
    packed = low.copy()
    packed[: high.size] |= high << 4
    return packed


def unpack_nibbles(packed: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The inverse of `pack_nibbles` for an array of `shape`. Raises ValueError when the bytes do not fit it."""
    size = int(np.prod(shape, dtype=np.int64))
    if packed.size != (size + 1) // 2:
        raise ValueError(f"{size} numbers of 4 bits take {(size + 1) // 2} bytes, got {packed.size}")
    flat = np.empty(packed.size * 2, np.uint8)
    flat[0::2] = packed.reshape(-1) & NIBBLE_MAX
    flat[1::2] = packed.reshape(-1) >> 4
    return flat[:size].reshape(shape)
