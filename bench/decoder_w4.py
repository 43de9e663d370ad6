"""How little four and a half bits can cost: the product's rounding of SmolLM2 off its grid, one recipe after another.

usage: python bench/decoder_w4.py [--only NAME …] [--windows 128] [--held-out 8] [--json bench/results/decoder_w4.json]

Bits are those of the decoder's linears, scales and zero points included; embedding and head stay as they are, for us
and for llama.cpp's files, whose weights are read and multiplied in f32: the figures are the weights' loss alone.
Scales and norms have the types that `triptych compress` would give them in this folder.
Calibration: what the model itself says. Loss: KL divergence on held-out text that people wrote, which no setting was
chosen on; `texts.py` makes both. Finished layers lie beside the models, so that a run that was broken off goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from record import Measure, Target, record, write
from rivals.install import DITHERED, MODELS
from torch_llama import Llama

from triptych.compress.model import Model
from triptych.compress.recipe import BUILTIN, Recipe, RecipeStep
from triptych.compress.run import Job, compress
from triptych.compress.samples import Sample
from triptych.core.bundle import Bundle
from triptych.core.quantized import Held, Quantized, plain
from triptych.core.spec import Modality
from triptych.session.compression import Place, in_fp32
from triptych.session.opening import CACHE

OURS, THEIRS = "w4", "llama.cpp Q4_K_M"
BITS, MIX = {"bits": 4, "group_size": 32}, {"widths": (4, 8), "most_bits": 4.6, "group_size": 64}
W4, HEAD = (step for step in BUILTIN[OURS].steps if step.part in ("decoder", "embedding"))
STEPS = {
    "to nearest, clipped, groups of 32": RecipeStep(part="decoder", **BITS),
    "GPTQ, groups of 32": RecipeStep(part="decoder", round="gptq", **BITS),
    "AWQ and GPTQ, groups of 32": RecipeStep(part="decoder", round="gptq", scale="awq", **BITS),
    "GPTQ, 4 and 8 bits": RecipeStep(part="decoder", round="gptq", **MIX),
    OURS: W4,
    "w4 with widths of 4 to 8 bits": replace(W4, widths=(4, 5, 6, 8)),
    "w4 in Q4_K_M's bits": replace(W4, most_bits=5.53),
}


def compressed(bundle: Bundle, step: RecipeStep, samples: Sequence[Sample]) -> dict[str, Held]:
    """The decoder's linears, and the norms that took scales, by own name."""
    model = Model.open(bundle)
    place = Place(DITHERED, bundle, model)
    recipe = Recipe(name="one step and the head", steps=(step, HEAD))
    job = Job(
        model=model,
        recipe=recipe,
        shapes=place.shapes,
        samples=samples,
        kind=place.kind(recipe),
        small_kinds=place.small_kinds(),
        work=MODELS / "decoder_w4.work",
        seed=bundle.manifest.weights_digest,
        progress=_tell,
    )
    return {name.removesuffix(".weight"): held for name, held in compress(job).changed["decoder"].items()}


def calibration(num_windows: int) -> list[Sample]:
    """What the model said when it was let run, spread over `texts.talks`."""
    talks = np.load(DITHERED / "talks.npy")
    return [
        Sample(
            name=f"talk {place}",
            token_ids=ids,
            embeddings=np.empty((len(ids), 0), np.float32),
            modality=np.full(len(ids), Modality.TEXT, np.uint8),
            is_answer=np.arange(len(ids)) > 0,
            tiles=np.empty((0, 1, 1, 3), np.uint8),
            rows=np.empty(0, np.int32),
        )
        for place, ids in enumerate(talks[:: len(talks) // num_windows])
    ]


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


def logprobs(llama: Llama, windows: Any) -> Any:
    """(windows, tokens, vocab)."""
    with torch.no_grad():
        return torch.stack([torch.log_softmax(llama.logits(ids[None])[0], -1) for ids in windows])


def losses(exact: Any, found: Any) -> dict[str, Any]:
    """KL divergence of each position, and whether the likeliest token stays."""
    klds = [(right.exp() * (right - other)).sum(-1) for right, other in zip(exact, found, strict=True)]
    return {"kld": torch.stack(klds), "same": exact.argmax(-1) == found.argmax(-1)}


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
    parser.add_argument("--windows", type=int, default=128, help="of calibration, 512 tokens each")
    parser.add_argument("--held-out", type=int, default=8, help="windows likewise")
    parser.add_argument("--only", nargs="*", help="names of ways to take")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    llama, bundle, samples = Llama(DITHERED), in_fp32(DITHERED, CACHE, _tell), calibration(asked.windows)
    held = torch.from_numpy(np.load(DITHERED / "held_out.npy")).long()
    held = held[:: max(1, len(held) // asked.held_out)]
    exact, done = logprobs(llama, held), list[Measure]()
    for name in [*STEPS, THEIRS, "llama.cpp Q4_0"]:
        if asked.only and name not in asked.only:
            continue
        started = time.perf_counter()
        if name in STEPS:
            other, bits = replaced(llama, compressed(bundle, STEPS[name], samples))
        else:
            kind = name.rpartition(" ")[2].lower()
            other, bits = llama_cpp(llama, MODELS / f"smollm2-dithered-{kind}.gguf")
        done += measures(name, bits, losses(exact, logprobs(other, held)))
        told = " · ".join(f"{each.name} {each.value:.4f}" for each in done[-4:])
        print(f"{name} · {told} · {time.perf_counter() - started:.0f} s", flush=True)
        if asked.json:
            settings = {"calibration_windows": len(samples), "held_out_windows": len(held), "window_tokens": 512}
            write(asked.json, record("decoder_w4", done, targets(done), settings))


def _tell(what: str, share: float) -> None:
    print(f"\r  {what} {share:.0%}    ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
