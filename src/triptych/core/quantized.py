"""Numbers in few bits: codes, scales, zero points, and what they stand for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A weight, affine: `value = (code - zero) * scale`, with one scale and zero a group of neighbours along the width.

    codes: (rows, groups, size) uint8, in [0, 2^bits - 1]; scales: (rows, groups, 1) float16, float32 or bfloat16;
    zeros: (rows, groups, 1) uint8. A symmetric weight has 2^(bits - 1) for every zero. `shape` is the weight's own
    where it is no matrix (a convolution's kernel, rows first); `width` may be padded up to whole groups.
    `input_scale`: static scale of the activations that it meets, in symmetric 8 bits; None: they are left alone.
    """

    bits: int
    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: NDArray[np.uint8]
    shape: tuple[int, ...]
    input_scale: float | None = None

    @property
    def group_size(self) -> int:
        return int(self.codes.shape[2])

    @property
    def is_symmetric(self) -> bool:
        """Whether every zero is the middle one, so that none need be stored."""
        return bool(np.all(self.zeros == 1 << (self.bits - 1)))

    @property
    def num_bits(self) -> int:
        """Of storage, all told: codes, scales, and zero points where they are not all the middle."""
        zeros = 0 if self.is_symmetric else self.zeros.size * self.bits
        return self.codes.size * self.bits + 8 * self.scales.nbytes + zeros


def dequantize(quantized: Quantized) -> Float:
    """The weight that the codes stand for, in its own shape."""
    codes = quantized.codes.astype(np.float32)
    values: Float = (codes - quantized.zeros.astype(np.float32)) * quantized.scales.astype(np.float32)
    width = int(np.prod(quantized.shape[1:]))
    return np.ascontiguousarray(values.reshape(len(codes), -1)[:, :width]).reshape(quantized.shape)


Held = NDArray[Any] | Quantized  # a tensor, in whichever form a checkpoint has it


def plain(held: Held) -> NDArray[Any]:
    """The numbers themselves, in the type that they are stored in; f32 of a quantized weight."""
    return dequantize(held) if isinstance(held, Quantized) else held


def num_bits(held: Held) -> int:
    """Of storage, in the form that it has."""
    return held.num_bits if isinstance(held, Quantized) else held.nbytes * 8


def digest(held: Held) -> str:
    """Of every number and of how it is held; scales count by their value, in whichever type. 64 hex digits."""
    kind: tuple[object, ...]
    arrays: list[NDArray[Any]]
    if isinstance(held, Quantized):
        kind = (held.bits, tuple(map(int, held.shape)), held.input_scale)
        arrays = [held.codes, held.zeros, held.scales.astype(np.float32)]
    else:
        kind, arrays = (str(held.dtype),), [held]
    found = hashlib.sha256(repr((kind, [array.shape for array in arrays])).encode())
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def reshaped(held: Held, *shape: int) -> Held:
    """The same numbers, rows as they were, in another shape: a kernel as a matrix, or the other way."""
    return replace(held, shape=shape) if isinstance(held, Quantized) else held.reshape(shape)
