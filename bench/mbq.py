"""Does it pay to weigh tokens by modality? MBQ beside plain AWQ on answers after pictures, several decoders over.

usage: python bench/mbq.py FP32_BUNDLE [--every 4] [--seeds 0 1 2] [--json bench/results/mbq.json]

FP32_BUNDLE is triptych-mini compiled with `--weights fp32`. Its decoder is put off its 4-bit grid first (the noise of
`dithered.py`), else nothing is lost and nothing can be compared. Each seed is another such decoder: with one alone it
is chance which way rounding falls. All ways are `triptych compress`'s own, every linear in 4 bits by GPTQ: channels
scaled, and in scales and GPTQ alike tokens weighed by what the loss feels of their modality (`scale = "mbq"`), or all
the same (`awq`). Calibrated on the tasks' `calibrate`, judged on answers to their `single` questions about pictures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compression.tasks import Case, cases
from dithered import dithered
from numpy.typing import NDArray
from record import Measure, Target, record, write
from rivals.install import GGUF

from triptych.backends.torch_graph import TorchPart
from triptych.compress.model import Model
from triptych.compress.recipe import Recipe, RecipeStep
from triptych.compress.run import Job, compress
from triptych.compress.samples import Conversation, Sample
from triptych.core.bundle import Bundle, open_bundle
from triptych.core.table import open_table
from triptych.session.calibration import prepare

COMMON: dict[str, Any] = {"part": "decoder", "bits": 4, "group_size": 64, "round": "gptq"}
WAYS = {"AWQ": RecipeStep(scale="awq", **COMMON), "MBQ": RecipeStep(scale="mbq", **COMMON)}
RESAMPLES = 10_000


def off_grid(bundle: Bundle, seed: int) -> Model:
    """The bundle's model with another decoder: its own and noise of one step of its grid."""
    parts = {name: TorchPart.open(bundle.file(f"{name}.xml")) for name in ("vision", "projector", "decoder")}
    noisy = {name.removeprefix("model.").removesuffix(".weight"): held for name, held in dithered(GGUF, seed).items()}
    own = parts["decoder"].weights
    own |= {name: torch.from_numpy(noisy[name].astype(np.float32)) for name in own if name.endswith("_proj")}
    return Model(parts, open_table(bundle.file("embedding.npy")))


def prepared(bundle: Bundle, asked: Sequence[Case]) -> list[Sample]:
    return prepare(bundle, [Conversation(name=case.id, chat=case.chat()) for case in asked], lambda *_: None)


def rounded(model: Model, way: str, samples: Sequence[Sample]) -> None:
    """Put the decoder in 4 bits in place."""
    shapes = {f"{name}.weight": tuple(held.shape) for name, held in model.exact("decoder").items()}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            model=model, recipe=Recipe(name=way, steps=(WAYS[way],)), shapes={"decoder": shapes}, samples=samples,
            kind="fp16", small_kinds={"decoder": "fp32"}, work=Path(folder), seed="", progress=lambda what, share: None,
        )  # fmt: skip
        model.use(compress(job).changed)


def logprobs(model: Model, samples: Sequence[Sample]) -> list[Any]:
    with torch.no_grad():
        return [torch.log_softmax(model.logits(sample), -1) for sample in samples]


def divergences(exact: Sequence[Any], found: Sequence[Any]) -> NDArray[np.float64]:
    """Mean KL divergence over each sample's answer."""
    return np.array([float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(exact, found, strict=True)])


def paired(plain: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float, float]:
    """Of losses (seeds, samples): the means' ratio, and its 95 % interval, each time over other samples and seeds."""
    rng, (seeds, count) = np.random.default_rng(0), plain.shape
    ratios = []
    for _ in range(RESAMPLES):
        pick = np.ix_(rng.integers(0, seeds, seeds), rng.integers(0, count, count))
        ratios.append(other[pick].mean() / plain[pick].mean())
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(other.mean() / plain.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--every", type=int, default=4, help="of the questions one in so many")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    started, bundle = time.perf_counter(), open_bundle(asked.bundle)
    used = prepared(bundle, cases("calibrate"))
    held = [sample for sample in prepared(bundle, cases("single")[:: asked.every]) if sample.has_media]
    lost: dict[str, list[NDArray[np.float64]]] = {way: [] for way in WAYS}
    for number, seed in enumerate(asked.seeds):
        model = off_grid(bundle, seed)
        right = logprobs(model, held)
        for way in WAYS:
            rounded(model, way, used)
            lost[way].append(divergences(right, logprobs(model, held)))
            print(f"seed {seed}, {way}: {lost[way][-1].mean():.4f}, {time.perf_counter() - started:.0f} s", flush=True)
        _tell(lost, asked, len(used), asked.seeds[: number + 1])


def _tell(lost: dict[str, list[NDArray[np.float64]]], asked: argparse.Namespace, used: int, seeds: list[int]) -> None:
    """What is known so far, printed and written."""
    plain, other = (np.stack(lost[way]) for way in WAYS)
    ratio, low, high = paired(plain, other)
    better = 100 * float((other < plain).mean())
    print(f"MBQ / AWQ: {ratio:.3f} ({low:.3f} to {high:.3f}), better on {better:.0f} % of answers", flush=True)
    done = [
        Measure(name=f"KL divergence after pictures, seed {seed}", subject=way, unit="nat", value=float(own.mean()),
                lowest=float(np.quantile(own, 0.05)), highest=float(np.quantile(own, 0.95)), num_samples=len(own))
        for way in WAYS for seed, own in zip(seeds, lost[way], strict=True)
    ]  # fmt: skip
    aim = Target(name="MBQ's divergence after pictures over AWQ's", value=ratio, unit="×", at_most=1.0, lowest=low,
                 highest=high)  # fmt: skip
    settings = {"calibration": used, "held_out": plain.shape[1], "group": 64, "better_share": better,
                "interval": "95 %, over samples and seeds", "spread": "5 % and 95 % of the samples"}  # fmt: skip
    if asked.json:
        write(asked.json, record("mbq", done, [aim], settings))


if __name__ == "__main__":
    main()
