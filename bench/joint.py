"""Scales shared by two encoders: what each weighting leaves to whom, when observers stop, how the loss pulls.

usage: python bench/joint.py --json OUT

Pictures come through triptych-mini's own tower and projector, speech through Whisper-base's encoder and a projector
that is made here (bench/whisper/streams.py says how); both end in SmolLM2-135M's 576 channels. Triptych serves no
audio yet: this is about the library functions of compress/fuse and compress/observe.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import record
import torch
from torch import Tensor
from whisper.clips import RATE, clips
from whisper.hearing import spectra, spelt, transcribe
from whisper.source import load
from whisper.streams import FRAMES_A_SECOND, Reader, Speech, turned

from triptych.backends.torch_graph import Hooks
from triptych.compress.fuse import FuseConfig, fuse, loudest, sqnr_db
from triptych.compress.observe import ObserverConfig, ScaleObserver, alignment
from triptych.core.spec import Modality

BITS = (8, 6)
WEIGHTINGS = ("snr", "equal", "worst", "maxmin")
INTERVALS = (1, 10, 50)
STEPS = 4000  # an observer is given at most
PLACES = ("layers.0.self_attn.q_proj", "layers.15.mlp.gate_proj", "layers.15.mlp.down_proj")
ALIGNED = 8  # pairs of a picture and a piece of speech
PIECE_S = 6  # of speech that the decoder reads at once
Rows = Mapping[Modality, Sequence[Tensor]]


def speech() -> list[Speech]:
    """What Whisper's encoder makes of the clips, in pieces, with what Whisper hears in each."""
    model, words = load()
    found = clips()
    with torch.inference_mode():
        hidden = torch.cat([model.model.encoder(piece[None]).last_hidden_state for piece in spectra(found)])
    texts = spelt(transcribe(model, hidden), words)
    sounds = [sound for clip in found for sound in clip.pieces]
    lengths = [len(sound) * FRAMES_A_SECOND // RATE for sound in sounds]
    return [
        Speech(frames=row[:length].clone(), text=text) for row, length, text in zip(hidden, lengths, texts, strict=True)
    ]


def shorter(pieces: Sequence[Speech]) -> list[Speech]:
    """Cut alike in time and words, so that a decoder reads each at once."""
    found = []
    for piece in pieces:
        words, count = piece.text.split(), max(1, round(len(piece.frames) / FRAMES_A_SECOND / PIECE_S))
        frames, texts = np.array_split(np.arange(len(piece.frames)), count), np.array_split(words, count)
        found += [
            Speech(frames=piece.frames[part], text=" ".join(text)) for part, text in zip(frames, texts, strict=True)
        ]
    return found


def inside(reader: Reader, pieces: Sequence[Speech], projector: Tensor) -> tuple[dict[str, Rows], list[record.Measure]]:
    """What layers of the decoder meet of either stream, and how the loss pulls at their rows, step by step."""
    met: dict[str, dict[Modality, list[Tensor]]] = {place: {Modality.IMAGE: [], Modality.AUDIO: []} for place in PLACES}
    ratios, cosines = [], []
    for step in range(ALIGNED):
        sample, piece = reader.samples[step % len(reader.samples)], pieces[step * len(pieces) // ALIGNED]
        length = len(reader.embedded("<|im_start|>user\n")[1])
        heard = np.arange(length, length + len(piece.rows))
        shown = np.flatnonzero(sample.modality == Modality.IMAGE)
        pulls = {
            Modality.IMAGE: reader.of_image(sample, _keeping(met, Modality.IMAGE, shown))[1],
            Modality.AUDIO: reader.of_speech(piece, projector, _keeping(met, Modality.AUDIO, heard))[1],
        }
        found = alignment(step, pulls)
        ratios.append(found.norms[Modality.IMAGE] / found.norms[Modality.AUDIO])
        cosines.append(found.cosines[Modality.IMAGE, Modality.AUDIO])
    return dict(met), [
        record.measure("gradient norm, image over audio", "decoder's entrance", "×", ratios),
        record.measure("cosine of gradient magnitudes by channel", "decoder's entrance", "", cosines),
    ]


def _keeping(met: Mapping[str, dict[Modality, list[Tensor]]], modality: Modality, rows: np.ndarray) -> Hooks:
    def keep(name: str, x: Tensor) -> Tensor:
        if name in met:
            met[name][modality].append(x.detach()[rows])
        return x

    return Hooks(on_input=keep)


def shared(place: str, rows: Rows) -> list[record.Measure]:
    """SQNR of each stream under each weighting, between the loudest's scales and those of its own."""
    streams = {modality: torch.cat(list(own)) for modality, own in rows.items()}
    found = []
    for bits in BITS:
        by = {"unified maximum": {each: sqnr_db(own, loudest(streams, bits), bits) for each, own in streams.items()}}
        for weighting in WEIGHTINGS:
            by[weighting] = dict(fuse(streams, FuseConfig(weighting=weighting, bits=bits)).sqnr_db)
        by["scales of its own"] = {m: fuse({m: own}, FuseConfig(bits=bits)).sqnr_db[m] for m, own in streams.items()}
        for weighting, levels in by.items():
            words = ", ".join(f"{each.name.lower()} {level:.1f}" for each, level in levels.items())
            print(f"{place:34} {bits} bits {weighting:18} {words} dB", flush=True)
            for each, level in levels.items():
                subject = f"{place}, {bits} bits, {weighting}"
                found.append(record.measure(f"SQNR of {each.name.lower()}", subject, "dB", [level]))
    image, audio = (float(streams[each].square().mean().sqrt()) for each in (Modality.IMAGE, Modality.AUDIO))
    return [*found, record.measure("loudness, image over audio", place, "×", [image / audio])]


def settling(rows: Rows) -> list[record.Measure]:
    """Calibration steps until an observer of each tower's rows stands still; a step is a picture, or 2 s of speech."""
    found = []
    for modality, items in rows.items():
        greatest = max(float(item.abs().max()) for item in items) / 127
        for interval in INTERVALS:
            draws = np.random.default_rng(0)
            observer = ScaleObserver(config=ObserverConfig(interval=interval))
            while not observer.is_settled and observer.num_steps < STEPS:
                observer.see(items[draws.integers(len(items))])
            subject = f"{modality.name.lower()}, interval {interval}"
            share = (observer.scale or 0.0) / greatest
            state = "settled" if observer.is_settled else "not settled"
            print(f"{subject:24} {state} after {observer.num_steps} steps, {observer.num_updates} updates, "
                  f"{share:.3f} of the greatest", flush=True)  # fmt: skip
            found.append(record.measure(f"steps, {state}", subject, "steps", [float(observer.num_steps)]))
            found.append(record.measure("settled scale, share of the greatest", subject, "×", [share]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    pieces = speech()  # Whisper is gone before SmolLM2 comes: both at once need 2 GB
    reader = Reader()
    short, images = shorter(pieces), reader.image_rows()
    projectors = {"fitted": reader.fitted(short), "turned": turned(short[0].frames.shape[1], images[0].shape[1])}
    found = []
    for name, projector in projectors.items():
        rows = {Modality.IMAGE: images, Modality.AUDIO: [piece.rows @ projector for piece in pieces]}
        found += shared(f"entrance, {name} projector", rows)
    met, pulls = inside(reader, short, projectors["fitted"])
    for place, own in met.items():
        found += shared(place, own)
    seconds = [part for own in rows[Modality.AUDIO] for part in own.split(25)]
    found += [*pulls, *settling({Modality.IMAGE: images, Modality.AUDIO: seconds})]
    settings = {
        "pictures": len(images),
        "image rows": sum(map(len, images)),
        "speech_s": sum(len(piece.frames) for piece in pieces) / FRAMES_A_SECOND,
        "projector of pictures": "triptych-mini's own, trained",
        "projector of speech": "fitted: ridge to the words' embeddings; turned: a random rotation. None is trained",
        "observed": "turned",
    }
    record.write(asked.json, record.record("joint", found, settings=settings))


if __name__ == "__main__":
    main()
