"""Does it pay to weigh tokens by modality? MBQ beside plain AWQ on answers after pictures, sample by sample.

usage: python bench/mbq.py FP32_BUNDLE SAMPLES.jsonl [--calibrate 48] [--json bench/results/mbq.json]

FP32_BUNDLE is triptych-mini compiled with `--weights fp32`. Its decoder is put off its 4-bit grid first (the weights of
`dithered.py`), else nothing is lost and nothing can be compared. Both ways scale the inputs of queries, keys, values,
gates and ups, and round all linears to nearest with clipped ranges; only the tokens' weights differ.
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
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from record import Measure, record, write  # noqa: E402
from torch_llama import LINEARS, NUM_LAYERS, Llama  # noqa: E402

from triptych.compress import awq, balance  # noqa: E402
from triptych.compress.calibrate import Seen, calibrate  # noqa: E402
from triptych.compress.model import Model  # noqa: E402
from triptych.compress.rounding import Grid, fake_quantized  # noqa: E402
from triptych.compress.samples import Sample, read  # noqa: E402
from triptych.core.bundle import open_bundle  # noqa: E402
from triptych.core.spec import Modality  # noqa: E402
from triptych.session.calibration import prepare  # noqa: E402

DITHERED = ROOT / "bench" / ".rivals" / "models" / "smollm2-dithered-hf"
GROUP = 64
PAIRS = (tuple(LINEARS[:3]), tuple(LINEARS[4:6]))  # linears that share an input which a norm makes
RESAMPLES = 10_000

Felt = dict[str, dict[Modality, float]]


def dithered(model: Model) -> None:
    """Put the decoder's linears off their grid, for good."""
    llama = Llama(DITHERED)
    for name in llama.names():
        model.parts["decoder"].weights[name] = llama.weights[name]


def rounded(exact: Mapping[str, Any], seen: Mapping[str, Seen], bits: int, weights: Felt | None) -> dict[str, Any]:
    """All linears in `bits`. weights: None rounds without scales; empty weighs all tokens alike, which is AWQ."""
    grid = Grid(bits=bits, group_size=GROUP)
    found = {}
    for layer in range(NUM_LAYERS):
        for pair in PAIRS:
            names = [f"layers.{layer}.{name}" for name in pair]
            all_alike = awq.balanced(seen[names[0]].channels, (weights or {}).get(balance.block_end(names[0])))
            scales = torch.ones(exact[names[0]].shape[1])
            if weights is not None:
                scales = awq.search([exact[name] for name in names], all_alike, grid).scales
            importance = all_alike.gram.diagonal() / scales.square()
            for name in names:
                found[name] = fake_quantized(exact[name] * scales, grid, importance=importance) / scales
        for name in (f"layers.{layer}.{LINEARS[3]}", f"layers.{layer}.{LINEARS[6]}"):
            found[name] = fake_quantized(exact[name], grid)
    return found


def logprobs(model: Model, samples: Sequence[Sample]) -> list[Any]:
    with torch.no_grad():
        return [torch.log_softmax(model.logits(sample), -1) for sample in samples]


def divergences(exact: Sequence[Any], found: Sequence[Any]) -> NDArray[np.float64]:
    """Mean KL divergence over each sample's answer."""
    return np.array([float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(exact, found, strict=True)])


def paired(plain: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean of other over mean of plain, and its 95 % interval over resampled samples."""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(plain), (RESAMPLES, len(plain)))
    ratios = other[picks].mean(1) / plain[picks].mean(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(other.mean() / plain.mean()), float(low), float(high)


def felt_by(model: Model, samples: Sequence[Sample]) -> balance.Felt:
    def logits(sample: Sample, judged: Any, hooks: Any) -> Any:
        with torch.no_grad():
            embeddings = model.embed(sample)
        return model.decode(embeddings, judged, {"decoder": hooks})

    return balance.sensitivities(logits, samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--calibrate", type=int, default=48, help="samples, the others are held out")
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    started = time.perf_counter()
    bundle = open_bundle(asked.bundle)
    samples = prepare(bundle, read(asked.samples), lambda what, share: None)
    used, rest = samples[: asked.calibrate], samples[asked.calibrate :]
    held = [sample for sample in rest if sample.has_media]
    model = Model.open(bundle)
    dithered(model)
    decoder = model.parts["decoder"]
    exact = dict(decoder.weights)
    felt = felt_by(model, used)
    weights = balance.token_weights(felt)
    seen = calibrate(model, used, "decoder", [f"layers.{at}.{pair[0]}" for at in range(NUM_LAYERS) for pair in PAIRS])
    right = logprobs(model, held)
    _tell_felt(weights, used, time.perf_counter() - started)
    ways: dict[str, Felt | None] = {"rounding alone": None, "AWQ": {}, "MBQ": weights}
    ways["AWQ, text alone"] = _mute(weights)
    settings = {"calibration": len(used), "held_out": len(held), "group": GROUP, "interval": "95 %, over samples"}
    done: list[Measure] = []
    for bits in asked.bits:
        lost = {}
        for name, chosen in ways.items():
            decoder.weights = exact | rounded(exact, seen, bits, chosen)
            lost[name] = divergences(right, logprobs(model, held))
            done.append(_measure(f"KL divergence after pictures, {bits} bits", name, "nat", lost[name]))
            print(f"{bits} bits, {name}: {lost[name].mean():.4f}, {time.perf_counter() - started:.0f} s", flush=True)
        for name in ("MBQ", "AWQ, text alone"):
            ratio, low, high = paired(lost["AWQ"], lost[name])
            better = 100 * float((lost[name] < lost["AWQ"]).mean())
            words = f"{ratio:.3f} ({low:.3f} to {high:.3f}), better on {better:.0f} % of samples"
            print(f"{bits} bits, {name} / AWQ: {words}", flush=True)
            done.append(
                Measure(name=f"ratio to AWQ, {bits} bits", subject=name, unit="", value=ratio, lowest=low, highest=high,
                        num_samples=len(held))
            )  # fmt: skip
        if asked.json:
            write(asked.json, record("mbq", done, settings=settings))


def _mute(weights: Felt) -> Felt:
    """Pictures count for nothing: what calibration without them would do."""
    return {name: dict.fromkeys(own, 0.0) | {Modality.TEXT: 1.0} for name, own in weights.items()}


def _measure(name: str, subject: str, unit: str, values: NDArray[np.float64]) -> Measure:
    low, high = np.quantile(values, [0.05, 0.95])
    return Measure(name=name, subject=subject, unit=unit, value=float(values.mean()), lowest=float(low),
                   highest=float(high), num_samples=len(values))  # fmt: skip


def _tell_felt(weights: Felt, used: Sequence[Sample], seconds: float) -> None:
    """How much a picture's token weighs beside one of text, and how many there are of each."""
    for kind in balance.BLOCK_ENDS:
        ratios = [own.get(Modality.IMAGE, float("nan")) for name, own in weights.items() if name.endswith(kind)]
        print(f"{kind}: " + " ".join(f"{ratio:.2f}" for ratio in ratios))
    counts = np.bincount(np.concatenate([sample.modality for sample in used]), minlength=2)
    print(f"{counts[0]:,} tokens of text, {counts[1]:,} of pictures; {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
