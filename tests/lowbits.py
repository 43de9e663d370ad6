"""Random weights in few bits, as folders that other programs would write; packed here by plain loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from triptych.core.quantized import Quantized

SCALES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def random_weight(
    rows: int = 8, width: int = 64, *, bits: int = 4, size: int | None = 32, symmetric: bool = True,
    scale_type: str = "float16", seed: int = 0, input_scale: float | None = None,
) -> Quantized:  # fmt: skip
    """Every code occurs; scales and zero points differ from group to group."""
    rng = np.random.default_rng(seed)
    groups, top = width // (size or width), 1 << bits
    codes = rng.integers(0, top, (rows, groups, size or width)).astype(np.uint8)
    zeros = np.full((rows, groups, 1), top // 2) if symmetric else rng.integers(0, top, (rows, groups, 1))
    return Quantized(
        bits=bits,
        codes=codes,
        scales=rng.uniform(0.01, 0.1, (rows, groups, 1)).astype(SCALES[scale_type]),
        zeros=zeros.astype(np.uint8),
        shape=(rows, width),
        input_scale=input_scale,
    )


def shifted_in(numbers: list[int], bits: int) -> list[int]:
    """Numbers one after another into 32-bit words, the earlier in the lower bits, as one long whole number."""
    whole = sum(number << (bits * place) for place, number in enumerate(numbers))
    words = -(-len(numbers) * bits // 32)
    return [((whole >> (32 * word)) & 0xFFFFFFFF) for word in range(words)]


def as_int32(words: list[list[int]]) -> np.ndarray:
    return np.array(words, np.uint32).view(np.int32)


def gptq_tensors(held: Quantized, *, offset: int = 1) -> dict[str, np.ndarray]:
    """qweight (inputs · bits / 32, outputs), qzeros (groups, outputs · bits / 32), scales (groups, outputs)."""
    rows, groups, size = held.codes.shape
    codes, mask = held.codes.reshape(rows, -1), (1 << held.bits) - 1
    qweight = as_int32([shifted_in([int(code) for code in row], held.bits) for row in codes]).T
    zeros = [[(int(held.zeros[row, group, 0]) - offset) & mask for row in range(rows)] for group in range(groups)]
    return {
        "qweight": np.ascontiguousarray(qweight),
        "qzeros": as_int32([shifted_in(row, held.bits) for row in zeros]),
        "scales": np.ascontiguousarray(held.scales[..., 0].T),
        "g_idx": np.array([place // size for place in range(groups * size)], np.int32),
    }


def awq_tensors(held: Quantized) -> dict[str, np.ndarray]:
    """qweight (inputs, outputs / 8), qzeros (groups, outputs / 8): eight outputs a word, in AWQ's order."""
    rows, groups, _ = held.codes.shape

    def words(numbers: np.ndarray) -> list[int]:
        found = []
        for start in range(0, len(numbers), 8):
            nibbles = [int(numbers[start + column]) for column in AWQ_ORDER]
            found += shifted_in(nibbles, 4)
        return found

    codes = held.codes.reshape(rows, -1)
    return {
        "qweight": as_int32([words(codes[:, place]) for place in range(codes.shape[1])]),
        "qzeros": as_int32([words(held.zeros[:, group, 0]) for group in range(groups)]),
        "scales": np.ascontiguousarray(held.scales[..., 0].T),
    }


def write_folder(folder: Path, told: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": told}))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def under(module: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{module}.{kind}": values for kind, values in tensors.items()}
