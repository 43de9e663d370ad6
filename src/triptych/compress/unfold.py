"""A convolution as a matrix product: its kernel may be held in few bits like any linear weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import unfold

from triptych.errors import CheckpointError


def columns(x: Tensor, kernel: Tensor, *, stride: int = 1, padding: int = 0) -> Tensor:
    """What each output sees, (N, outputs, width) with width = channels · kernel size: x @ `matrix(kernel)`ᵀ convolves.

    x (N, C, T) under a kernel (out, C, K), or (N, C, H, W) under (out, C, K, L); outputs row by row. Where the stride
    is the kernel's side, as in a patch embedding, this is a reshape and copies nothing twice; else im2col.
    Raises CheckpointError for a grouped or depthwise kernel.
    """
    if x.ndim != kernel.ndim or x.shape[1] != kernel.shape[1] or x.ndim not in (3, 4):
        raise CheckpointError(
            f"a kernel {tuple(kernel.shape)} on {tuple(x.shape)} is no plain convolution of one or two dimensions",
            hint="grouped and depthwise kernels have no linear form; they stay as they are",
        )
    if x.ndim == 3:
        x, size, sides, steps = x[:, :, None], (1, kernel.shape[2]), (0, padding), (1, stride)
    else:
        size, sides, steps = (kernel.shape[2], kernel.shape[3]), (padding, padding), (stride, stride)
    found: Tensor = unfold(x, size, padding=sides, stride=steps)
    return found.transpose(1, 2)


def matrix(kernel: Tensor) -> Tensor:
    """The kernel as a linear weight, (out, width)."""
    return torch.flatten(kernel, 1)
