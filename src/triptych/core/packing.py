"""How low-bit numbers lie in memory: pack and unpack, nothing else.

Two 4-bit numbers share a byte, the earlier one in the low half, as OpenVINO and GGUF store them:

    byte 0        byte 1
    ├─ 1 ─┼─ 0 ─┤ ├─ 3 ─┼─ 2 ─┤     an odd count leaves the last high half zero

Numbers of 1 to 8 bits fill a row of 32-bit words, the earlier one in the lower bits, with no gap at a word's end, as
compressed-tensors and GPTQ store them; here of 3 bits:

    word 0                                 word 1
    ├ 10 ┼─ 9 ─┼ … ┼─ 1 ─┼─ 0 ─┤           ├ … ┼─ 11 ─┼─ 10 ┤     10's two lower bits first, its third in the next
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


def pack_words(values: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Numbers in [0, 2^bits), (rows, width), to (rows, `num_words`). Raises ValueError on one out of range."""
    rows, width = values.shape
    if values.size and int(values.max()) >> bits:
        raise ValueError(f"{bits} bits hold 0 to {(1 << bits) - 1}, got {values.max()}")
    words = np.zeros((rows, 4 * num_words(width, bits)), np.uint8)
    if bits == 8:
        words[:, :width] = values
    elif bits == 4:
        words[:, : (width + 1) // 2] = values[:, 0::2]
        words[:, : width // 2] |= values[:, 1::2] << 4
    else:
        ones = np.unpackbits(values.reshape(rows, width, 1), axis=2, count=bits, bitorder="little")
        packed = np.packbits(ones.reshape(rows, width * bits), axis=1, bitorder="little")
        words[:, : packed.shape[1]] = packed
    return words.view("<i4")


def unpack_words(words: NDArray[np.int32], bits: int, width: int) -> NDArray[np.uint8]:
    """The inverse of `pack_words` for rows of `width`. Raises ValueError when the words do not fit it."""
    rows, count = words.shape
    if count != num_words(width, bits):
        raise ValueError(f"{width} numbers of {bits} bits take {num_words(width, bits)} words, got {count}")
    held = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return held[:, :width].copy()
    if bits == 4:
        return np.stack([held & NIBBLE_MAX, held >> 4], axis=2).reshape(rows, -1)[:, :width]
    ones = np.unpackbits(held, axis=1, count=width * bits, bitorder="little").reshape(rows, width, bits)
    return np.packbits(ones, axis=2, bitorder="little")[..., 0]


def num_words(width: int, bits: int) -> int:
    """32-bit words that a row of `width` numbers takes."""
    return -(-width * bits // 32)
