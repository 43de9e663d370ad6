"""How a model's queries lie, measured before RoPE: written by `compress`, read by `engine/evict`."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.errors import BundleError

FILE = "kv_queries.npz"  # in a compressed folder and in a bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """mean: (layers, heads, head_dim) f32; covariance: (layers, heads, head_dim, head_dim) f32."""

    mean: NDArray[Any]
    covariance: NDArray[Any]

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, mean=self.mean.astype(np.float32), covariance=self.covariance.astype(np.float32))

    @classmethod
    def read(cls, path: Path, shape: tuple[int, int, int]) -> Queries:
        """shape: (layers, heads, head_dim) of the model. Raises BundleError when the file is not of such a one."""
        try:
            with np.load(path, allow_pickle=False) as file:
                found = cls(mean=file["mean"], covariance=file["covariance"])
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise BundleError(f"{path} holds no statistics of queries: {error}", hint="compress again") from error
        if found.mean.shape != shape or found.covariance.shape != (*shape, shape[-1]):
            raise BundleError(f"{path} is about {found.mean.shape} layers, heads and numbers, the model has {shape}")
        return found
