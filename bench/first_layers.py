"""What few bits would save in the first convolutions of towers, and what they would cost there.

usage: python bench/first_layers.py --json OUT

Each kernel is rounded in its linear form (compress/unfold); the noise is that of the convolution's own output on real
input: recorded speech, and pictures that the package carries. What GPTQ sees is other sound and other pictures than
what is measured on. Whisper's and triptych-mini's kernels are trained, the patch embedding of SigLIP-B's shape is not.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import record
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from whisper.clips import clips
from whisper.hearing import spectra
from whisper.source import load

from triptych.compress.gptq import factored, gptq
from triptych.compress.rounding import Grid, fitted, round_weight
from triptych.compress.unfold import columns, matrix
from triptych.core.quantized import dequantize

DATA = Path(str(files("triptych") / "data"))
SIGLIP = (768, 16, 93_000_000)  # hidden, patch, parameters of the tower
GRIDS = (Grid(bits=8), Grid(bits=6), Grid(bits=4, group_size=64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A convolution before a tower. rows: what it multiplies, (n, width), for GPTQ and to measure on; total: weights
    of the whole tower.
    """

    name: str
    weight: Tensor
    rows: tuple[Tensor, Tensor]
    total: int


def kernels() -> list[Kernel]:
    encoder = load()[0].model.encoder
    total = sum(weight.numel() for weight in encoder.parameters())
    sound = spectra(clips())[:2]
    with torch.inference_mode():
        first = torch.nn.functional.gelu(encoder.conv1(sound))
    tower = load_file(DATA / "mini" / "vision.safetensors")
    stem = next(weight.float() for name, weight in tower.items() if name.endswith("stem.weight"))
    hidden, patch, siglip = SIGLIP
    made = torch.randn(hidden, 3, patch, patch, generator=torch.Generator().manual_seed(0)) * 0.02
    shown = pictures(224)
    found = (
        ("Whisper-base conv1", encoder.conv1.weight, total, columns(sound, encoder.conv1.weight, padding=1)),
        ("Whisper-base conv2", encoder.conv2.weight, total, columns(first, encoder.conv2.weight, stride=2, padding=1)),
        ("triptych-mini stem", stem, sum(map(torch.numel, tower.values())), columns(shown, stem, stride=2, padding=1)),
        ("SigLIP-B patches, random", made, siglip, columns(shown, made, stride=patch)),
    )
    return [_kernel(*each) for each in found]


def pictures(side: int) -> Tensor:
    """(N, 3, side, side) in [-1, 1]."""
    found = [Image.open(path).convert("RGB").resize((side, side)) for path in sorted(DATA.glob("*/*.png"))]
    return torch.from_numpy(np.stack([np.asarray(one) for one in found])).permute(0, 3, 1, 2).float() / 127.5 - 1


def _kernel(name: str, weight: Tensor, total: int, rows: Tensor) -> Kernel:
    """The first half of the sounds or pictures is for GPTQ."""
    halves = [half.detach().reshape(-1, half.shape[-1]) for half in rows.split((len(rows) + 1) // 2)]
    first, second = (half[:: max(1, len(half) // 8192)] for half in halves)
    return Kernel(name=name, weight=matrix(weight).detach(), rows=(first, second), total=total)


def costs(kernel: Kernel) -> list[record.Measure]:
    """Saved against 16 bits, as a share of the whole tower in 16 bits; dB of the output, by rounding and by GPTQ."""
    found = []
    seen, rows = kernel.rows
    whole = rows @ kernel.weight.T
    for asked in GRIDS:
        grid = fitted(asked, kernel.name, kernel.weight.shape[1])[0]
        saved = 1 - grid.num_bits(*kernel.weight.shape) / (16 * kernel.weight.numel())
        share = 100 * saved * kernel.weight.numel() / kernel.total
        subject = f"{kernel.name}, {grid.bits} bits" + (f", groups of {grid.group_size}" if grid.group_size else "")
        found.append(record.measure("bytes saved, share of the tower", subject, "%", [share]))
        gram = factored(seen.T @ seen)
        for method, held in (("clipped", round_weight(kernel.weight, grid)), ("GPTQ", gptq(kernel.weight, gram, grid))):
            noise = (rows @ torch.from_numpy(dequantize(held)).T - whole).square().sum()
            level = float(10 * (whole.square().sum() / noise).log10())
            found.append(record.measure(f"output SQNR, {method}", subject, "dB", [level]))
            print(f"{subject:50} {method:8} {level:5.1f} dB, saves {share:.3f} %", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    found = [measure for kernel in kernels() for measure in costs(kernel)]
    record.write(asked.json, record.record("first_layers", found))


if __name__ == "__main__":
    main()
