"""What each quantizer costs Whisper-base: word error rate on recorded speech, KL divergence, the encoder's noise.

usage: python bench/whisper.py [--only NAME …] --json OUT

Everything is fetched at the first run (170 MB, pinned by digest) into bench/.rivals/whisper. Weights and activations
are fake-quantized in torch by the functions that `triptych compress` uses; Triptych serves no audio yet.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import record
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration
from whisper.clips import Clip, clips, spoken
from whisper.hearing import WordErrors, log_probabilities, spectra, spelt, transcribe, word_errors
from whisper.rounding import Part, Seen, Variant, rounded, size, watched
from whisper.source import load

VARIANTS = (
    Variant(name="encoder W8", part="encoder", bits=8),
    Variant(name="encoder W8A8 static", part="encoder", bits=8, activations="static"),
    Variant(name="encoder W8A8 static, smoothed", part="encoder", bits=8, activations="static", smooth=True),
    Variant(name="encoder W8A8 by token", part="encoder", bits=8, activations="dynamic"),
    Variant(name="encoder W4 nearest", part="encoder", bits=4, group_size=64),
    Variant(name="encoder W4 clipped", part="encoder", bits=4, group_size=64, method="clipped"),
    Variant(name="encoder W4 AWQ", part="encoder", bits=4, group_size=64, method="awq"),
    Variant(name="encoder W4 GPTQ", part="encoder", bits=4, group_size=64, method="gptq"),
    Variant(name="decoder W8", part="decoder", bits=8),
    Variant(name="decoder W4 nearest", part="decoder", bits=4, group_size=64),
    Variant(name="decoder W4 AWQ", part="decoder", bits=4, group_size=64, method="awq"),
    Variant(name="decoder W4 GPTQ", part="decoder", bits=4, group_size=64, method="gptq"),
    Variant(name="convolutions W6", part="conv", bits=6),
    Variant(name="convolutions W4 nearest", part="conv", bits=4, group_size=64),
    Variant(name="convolutions W4 GPTQ", part="conv", bits=4, group_size=64, method="gptq"),
)
PARTS: tuple[Part, ...] = ("encoder", "decoder", "conv")
CALIBRATED = {"encoder": "model.encoder.layers.0.fc1", "decoder": "model.decoder.layers.0.fc1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What fp32 hears and thinks: what all others are held against."""

    sound: Tensor
    hidden: Tensor
    tokens: Tensor
    thoughts: Tensor  # log-probabilities at each of its own tokens
    errors: WordErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Of one variant. sqnr_db: of the encoder's output, None where it is fp32's. divergence: nats a token."""

    errors: WordErrors
    sqnr_db: float | None
    divergence: Tensor
    seconds: float


class Ear:
    """Whisper, its tokenizer and the clips."""

    def __init__(self) -> None:
        self.model, self.words = load()
        self.clips: list[Clip] = clips()

    def truth(self) -> Truth:
        sound = spectra(self.clips)
        hidden = _encoded(self.model, sound)
        tokens = transcribe(self.model, hidden)
        errors = word_errors(self.clips, spelt(tokens, self.words))
        thoughts = log_probabilities(self.model, hidden, tokens)
        return Truth(sound=sound, hidden=hidden, tokens=tokens, thoughts=thoughts, errors=errors)

    def calibrated(self) -> dict[str, Seen]:
        """What each layer meets on the calibration clip and on the model's own words for it."""
        sound = spectra([spoken()])
        tokens = transcribe(self.model, _encoded(self.model, sound))
        return watched(self.model, lambda: log_probabilities(self.model, _encoded(self.model, sound), tokens))

    def loss(self, variant: Variant, truth: Truth, seen: Mapping[str, Seen]) -> Loss:
        started = time.perf_counter()
        with rounded(self.model, variant, seen):
            hidden = truth.hidden if variant.part == "decoder" else _encoded(self.model, truth.sound)
            tokens = transcribe(self.model, hidden)
            thoughts = log_probabilities(self.model, hidden, truth.tokens)
        noise = (hidden - truth.hidden).square().sum()
        return Loss(
            errors=word_errors(self.clips, spelt(tokens, self.words)),
            sqnr_db=None if variant.part == "decoder" else float(10 * (truth.hidden.square().sum() / noise).log10()),
            divergence=(truth.thoughts.exp() * (truth.thoughts - thoughts)).sum(-1),
            seconds=time.perf_counter() - started,
        )


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _encoded(model: WhisperForConditionalGeneration, sound: Tensor) -> Tensor:
    """Piece by piece: all at once would need a gigabyte."""
    return torch.cat([model.model.encoder(piece[None]).last_hidden_state for piece in sound])


def measures(name: str, loss: Loss, truth: Truth, bits: float) -> list[record.Measure]:
    """The rate has the interval that lines drawn with replacement give; the divergence its mean and 99 %."""
    low, high = loss.errors.interval()
    less, more = loss.errors.more_than(truth.errors)
    rate, base = 100 * loss.errors.rate, 100 * truth.errors.rate
    count, tokens = len(loss.errors.words), len(loss.divergence)
    mean, most = float(loss.divergence.mean()), float(loss.divergence.quantile(0.99))
    found = [
        _measure("word error rate", name, "%", (rate, 100 * low, 100 * high), count),
        _measure("word error rate, more than fp32", name, "%", (rate - base, 100 * less, 100 * more), count),
        _measure("KL divergence, mean to 99 %", name, "nats/token", (mean, mean, most), tokens),
        _measure("bits a weight", name, "bit", (bits, bits, bits), 1),
    ]
    if loss.sqnr_db is not None:
        found.append(_measure("encoder output SQNR", name, "dB", (loss.sqnr_db,) * 3, 1))
    return found


def judged(ear: Ear, variant: Variant, truth: Truth, seen: Mapping[str, Seen]) -> list[record.Measure]:
    bits, _ = size(ear.model, variant)
    loss = ear.loss(variant, truth, seen)
    noise = "" if loss.sqnr_db is None else f", encoder {loss.sqnr_db:5.1f} dB"
    print(f"{variant.name:34} {100 * loss.errors.rate:5.2f} %, KLD {loss.divergence.mean():.5f}{noise}, "
          f"{bits:.2f} bits, {loss.seconds:.0f} s", flush=True)  # fmt: skip
    return measures(variant.name, loss, truth, bits)


def _measure(name: str, subject: str, unit: str, found: tuple[float, float, float], count: int) -> record.Measure:
    value, low, high = found
    return record.Measure(
        name=name, subject=subject, unit=unit, value=value, lowest=low, highest=high, num_samples=count
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="variants by name")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    ear = Ear()
    truth, seen = ear.truth(), ear.calibrated()
    settings = {
        "spread": "word error rates: 95 % interval over lines; KL divergence: from the mean to 99 %",
        "words": sum(truth.errors.words),
        "calibrated on rows": {name: round(seen[layer].channels.num_tokens) for name, layer in CALIBRATED.items()},
        "weights": {part: size(ear.model, Variant(name="", part=part, bits=8))[1] for part in PARTS},
    }
    low, high = truth.errors.interval()
    rate = 100 * truth.errors.rate
    found = [_measure("word error rate", "fp32", "%", (rate, 100 * low, 100 * high), len(truth.errors.words))]
    print(f"{'fp32':34} {rate:5.2f} % ({100 * low:.2f} to {100 * high:.2f})", flush=True)
    for variant in VARIANTS:
        if not asked.only or variant.name in asked.only:
            found += judged(ear, variant, truth, seen)
            record.write(asked.json, record.record("whisper", found, settings=settings))


if __name__ == "__main__":
    main()
