"""Round weights to 8 or 4 bits, and back: the plain twin of what a device multiplies with.

Both are affine: `value ≈ (code - zero) * scale`, with `scale` and `zero` shared by one group of neighbours
along the input width. 8 bits: one group is a whole output row. 4 bits: `group_size` neighbours, and the range
is clipped where that lowers the squared error (a grid search over the clip ratio).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.quantized import Float, Quantized

CLIP_RATIOS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
CHUNK_VALUES = 1 << 16  # 256 KiB of f32: the search's temporaries stay in a core's cache
F16_TINY = 6.2e-5  # under it f16 keeps fewer than its ten fraction bits
F16_HUGE = 65504.0


def quantize(weight: NDArray[Any], *, bits: int, group_size: int | None = None) -> Quantized:
    """Round a (rows, width) matrix to nearest; `group_size` None makes a group of the whole row.

    Raises ValueError on values that are not finite, or a width that is not whole groups.
    """
    rows, width = weight.shape
    size = width if group_size is None else group_size
    if width == 0 or width % size:
        raise ValueError(f"width {width} is not a multiple of {size}")
    ratios = CLIP_RATIOS if bits < 8 else (1.0,)
    codes = np.empty((rows, width // size, size), np.uint8)
    scales = np.empty((rows, width // size, 1), np.float32)
    zeros = np.empty((rows, width // size, 1), np.uint8)

    def work(part: slice) -> None:
        groups = np.asarray(weight[part], np.float32).reshape(-1, width // size, size)
        if not np.isfinite(groups).all():
            raise ValueError("values that are not finite cannot be quantized")
        scales[part], zeros[part] = _search(groups, 2**bits - 1, ratios)
        codes[part] = _encode(groups, scales[part], zeros[part], 2**bits - 1)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, _row_chunks(rows, width)))
    return Quantized(bits=bits, codes=codes, scales=_narrow(scales), zeros=zeros, shape=weight.shape)


def _row_chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_VALUES // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def _search(groups: Float, top: int, ratios: tuple[float, ...]) -> tuple[Float, NDArray[np.uint8]]:
    """The scale and zero point of each group that leave the least squared error."""
    low = np.minimum(groups.min(-1, keepdims=True), 0.0)
    high = np.maximum(groups.max(-1, keepdims=True), 0.0)
    best_scale, best_zero = _grid(low, high, top)
    if len(ratios) == 1:
        return best_scale, best_zero.astype(np.uint8)
    best_error = _error(groups, best_scale, best_zero, top)
    for ratio in ratios[1:]:
        scale, zero = _grid(low * np.float32(ratio), high * np.float32(ratio), top)
        error = _error(groups, scale, zero, top)
        better = error < best_error
        best_scale, best_zero = np.where(better, scale, best_scale), np.where(better, zero, best_zero)
        best_error = np.where(better, error, best_error)
    return best_scale, best_zero.astype(np.uint8)


def _grid(low: Float, high: Float, top: int) -> tuple[Float, Float]:
    """Scale and zero point that spread `top` steps over [low, high]; an all-zero group gets scale 1."""
    scale = (high / top - low / top).astype(np.float32)
    scale = _round_scale(np.where(scale > np.finfo(np.float32).tiny, scale, np.float32(1)))
    return scale, np.clip(np.rint(-low / scale), 0, top)


def _round_scale(scale: Float) -> Float:
    """The scale as it will be stored, so that codes are chosen for the scale that is used."""
    fits = (scale >= F16_TINY) & (scale < F16_HUGE)
    return np.where(fits, np.where(fits, scale, 1).astype(np.float16).astype(np.float32), scale)


def _narrow(scales: Float) -> NDArray[Any]:
    """float16 when no scale loses anything by it (they were rounded before), else float32."""
    if scales.max(initial=0) >= F16_HUGE:
        return scales
    half = scales.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), scales) else scales


def _encode(groups: Float, scale: Float, zero: Float | NDArray[np.uint8], top: int) -> NDArray[np.uint8]:
    codes: Float = np.rint(groups / scale)
    codes += zero
    np.clip(codes, 0, top, out=codes)
    return codes.astype(np.uint8)


def _error(groups: Float, scale: Float, zero: Float, top: int) -> Float:
    """Squared error of each group, (rows, groups, 1), with no temporary but one."""
    work = groups * (1 / scale)
    np.rint(work, out=work)
    np.clip(work, -zero, top - zero, out=work)
    work *= scale
    work -= groups
    return np.asarray(np.einsum("rgs,rgs->rg", work, work)[..., None], np.float32)
