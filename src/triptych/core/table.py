"""The decoder's token embeddings on disk: rows by id, memory-mapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triptych.errors import BundleError

Table = Callable[[NDArray[np.int32]], NDArray[np.float32]]  # text ids (n,) → embeddings (n, hidden)


def open_table(path: Path) -> Table:
    """Rows become f32 as they are read; numpy has no bf16, so uint16 holds its bits. Raises BundleError."""
    try:
        stored = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise BundleError(f"{path} is no table of embeddings: {error}", hint="compile the checkpoint again") from error

    def table(ids: NDArray[np.int32]) -> NDArray[np.float32]:
        rows: NDArray[np.generic] = stored[ids]
        if rows.dtype == np.uint16:
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float32)

    return table
