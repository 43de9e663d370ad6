"""How little four and a half bits can cost: `triptych compress` on SmolLM2 off its grid, one recipe after another.

usage: python bench/decoder_w4.py [--only NAME …] [--held-out 16] [--json bench/results/decoder_w4.json]

Bits are those of the decoder's linears, scales and zero points included; embedding and head stay as they are, for us
and for llama.cpp's files, whose weights are read and multiplied in f32: the figures are the weights' loss alone.
Calibration: what the product takes when no samples are given, its questions and the model's own words. Loss: KL
divergence on held-out text that people wrote (`texts.py`), which no setting was chosen on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from record import Measure, Target, record, write  # noqa: E402
from torch_llama import Llama  # noqa: E402

from triptych.compile.checkpoint import Checkpoint  # noqa: E402
from triptych.core.quantized import Quantized, plain  # noqa: E402

MODELS = ROOT / "bench" / ".rivals" / "models"
FOLDER = MODELS / "smollm2-dithered-hf"
OURS, THEIRS = "w4", "llama.cpp Q4_K_M"
SETTINGS = {  # of the decoder's step; its head is in 8 bits, which is not counted here
    "to nearest, clipped, groups of 32": "bits = 4\ngroup_size = 32",
    "GPTQ, groups of 32": 'bits = 4\ngroup_size = 32\nround = "gptq"',
    "AWQ and GPTQ, groups of 32": 'bits = 4\ngroup_size = 32\nround = "gptq"\nscale = "awq"',
    "GPTQ, 4 and 8 bits": 'widths = [4, 8]\nmost_bits = 4.6\ngroup_size = 64\nround = "gptq"',
    OURS: "",
    "w4's, 4 to 8 bits": 'widths = [4, 5, 6, 8]\nmost_bits = 4.6\ngroup_size = 64\nround = "gptq"\nscale = "mbq"',
    "w4's, at 5.53 bits": 'widths = [4, 8]\nmost_bits = 5.53\ngroup_size = 64\nround = "gptq"\nscale = "mbq"',
}


def compressed(settings: str) -> dict[str, Quantized]:
    """The decoder's linears by own name, out of the folder that the product writes."""
    from triptych.session.compression import CompressConfig, compress_checkpoint

    with tempfile.TemporaryDirectory(dir=MODELS) as place:
        recipe = Path(place) / "recipe.toml"
        steps = f'[[steps]]\npart = "decoder"\n{settings}\n[[steps]]\npart = "embedding"\nbits = 8\n'
        recipe.write_text(steps)
        config = CompressConfig(recipe=str(recipe) if settings else OURS)
        compress_checkpoint(FOLDER, Path(place) / "out", config, _tell)
        checkpoint = Checkpoint.open(Path(place) / "out")
        names = [name for name in checkpoint.tensors if name.startswith("model.layers.")]
        held = {name.removeprefix("model.").removesuffix(".weight"): checkpoint.held(name) for name in names}
    return held


def replaced(llama: Llama, held: Mapping[str, Any]) -> tuple[Llama, float]:
    """With these in place, norms too, and the bits a weight of the linears."""
    other = llama.copy()
    other.weights |= {name: torch.from_numpy(np.array(plain(each), np.float32)) for name, each in held.items()}
    rounded = [each for each in held.values() if isinstance(each, Quantized)]
    return other, sum(each.num_bits for each in rounded) / sum(each.codes.size for each in rounded)


def llama_cpp(llama: Llama, path: Path) -> tuple[Llama, float]:
    """llama.cpp's file as weights, embedding and head left exact, and its bits a weight of the linears."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    from triptych.compile.gguf import GgufFile

    file, other, num_bits, numel = GgufFile(path), llama.copy(), 0.0, 0
    for name, tensor in file.tensors.items():
        own = name.removeprefix("model.").removesuffix(".weight")
        if own in llama.names():
            values = np.array(plain(file.read(tensor)), np.float32)
            size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
            num_bits += values.size / size * block_bytes * 8
            numel += values.size
            other.weights[own] = torch.from_numpy(values)
    return other, num_bits / numel


def losses(llama: Llama, other: Llama, windows: Any) -> dict[str, Any]:
    """KL divergence of each position, and whether the likeliest token stays."""
    klds, same = [], []
    with torch.no_grad():
        for ids in windows:
            right, found = (torch.log_softmax(model.logits(ids[None])[0], -1) for model in (llama, other))
            klds.append((right.exp() * (right - found)).sum(-1))
            same.append(right.argmax(-1) == found.argmax(-1))
    return {"kld": torch.stack(klds), "same": torch.stack(same)}


def measures(subject: str, bits: float, found: Mapping[str, Any]) -> list[Measure]:
    """The mean's extremes are those of windows: texts differ more than quantizers."""
    by_window = found["kld"].mean(1)
    values = {
        "bits a weight": (bits, "bit", (bits, bits)),
        "KL divergence, mean": (float(found["kld"].mean()), "nat", (float(by_window.min()), float(by_window.max()))),
        "KL divergence, 99 %": (float(found["kld"].flatten().quantile(0.99)), "nat", None),
        "same likeliest token": (100 * float(found["same"].float().mean()), "%", None),
    }
    count = len(by_window)
    return [
        Measure(name=name, subject=subject, unit=unit, value=value, lowest=(span or (value,))[0],
                highest=(span or (value,))[-1], num_samples=count)
        for name, (value, unit, span) in values.items()
    ]  # fmt: skip


def targets(done: list[Measure]) -> list[Target]:
    means = {each.subject: each.value for each in done if each.name == "KL divergence, mean"}
    if OURS not in means or THEIRS not in means:
        return []
    ratio = means[OURS] / means[THEIRS]
    return [Target(name="w4's divergence over llama.cpp Q4_K_M's", value=ratio, unit="×", at_most=1.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", type=int, default=16, help="windows of 512 tokens")
    parser.add_argument("--only", nargs="*", help="names of ways to take")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    llama = Llama(FOLDER)
    held = torch.from_numpy(np.load(FOLDER / "held_out.npy")).long()
    held = held[:: max(1, len(held) // asked.held_out)]
    done: list[Measure] = []
    for name in [*SETTINGS, THEIRS, "llama.cpp Q4_0"]:
        if asked.only and name not in asked.only:
            continue
        started = time.perf_counter()
        if name in SETTINGS:
            other, bits = replaced(llama, compressed(SETTINGS[name]))
        else:
            kind = name.rpartition(" ")[2].lower()
            other, bits = llama_cpp(llama, MODELS / f"smollm2-dithered-{kind}.gguf")
        done += measures(name, bits, losses(llama, other, held))
        told = " · ".join(f"{each.name} {each.value:.4f}" for each in done[-4:])
        print(f"{name} · {told} · {time.perf_counter() - started:.0f} s", flush=True)
        if asked.json:
            settings = {"calibration": "built-in questions and own words", "held_out_windows": len(held)}
            write(asked.json, record("decoder_w4", done, targets(done), settings))


def _tell(what: str, share: float) -> None:
    print(f"\r  {what} {share:.0%}    ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
