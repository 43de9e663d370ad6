"""The decoder's token embeddings on disk: rows by id, memory-mapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.core.quantized import Quantized
from triptych.errors import BundleError

Table = Callable[[NDArray[np.int32]], NDArray[np.float32]]  # text ids (n,) → embeddings (n, hidden)


def fits_table(quantized: Quantized) -> bool:
    """Whether a row has one scale and no zero point of its own, so that it can be stored a byte a number."""
    return quantized.bits == 8 and quantized.codes.shape[1] == 1 and quantized.is_symmetric


def write_int8_table(path: Path, quantized: Quantized) -> None:
    """Of each row its signed codes, then its scale's four bytes."""
    codes = (quantized.codes[:, 0].astype(np.int16) - 128).astype(np.int8)
    scales = quantized.scales.reshape(-1, 1).astype(np.float32).view(np.int8)
    np.save(path, np.concatenate([codes, scales], axis=1))


def open_table(path: Path) -> Table:
    """Rows become f32 as they are read; numpy has no bf16, so uint16 holds its bits. Raises BundleError."""
    try:
        stored = np.load(path, mmap_mode="r").view(np.ndarray)  # the class of mapped arrays takes longer for each row
    except (ValueError, EOFError) as error:
        raise BundleError(f"{path} is no table of embeddings: {error}", hint="compile the checkpoint again") from error

    def table(ids: NDArray[np.int32]) -> NDArray[np.float32]:
        rows: NDArray[np.generic] = stored[ids]
        if rows.dtype == np.uint16:
            return (rows.astype(np.uint32) << 16).view(np.float32)
        if rows.dtype == np.int8:
            scales = np.ascontiguousarray(rows[..., -4:]).view(np.float32)
            return rows[..., :-4].astype(np.float32) * scales
        return np.asarray(rows, np.float32)

    return table
