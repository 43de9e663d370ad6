"""Read a llama.cpp file as if it were a Hugging Face one: same names, same row order.

The header is read here, because the `gguf` package's own reader takes seconds over a vocabulary; unpacking
llama.cpp's block formats is that package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.core.quantized import Held, Quantized
from triptych.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
EVEN = {"Q4_0": 4, "Q8_0": 8}  # formats of `(code - middle) * scale`, with their bits
BLOCK = 32

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies. `num_heads` is set where llama.cpp reordered the rows for its own rotary embedding."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml's number for the block format
    offset: int
    num_heads: int | None


class GgufFile:
    """One open file: `metadata`, `config` in Hugging Face's words, `tensors` by their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            reader = _Reader(self._bytes)
            num_tensors = reader.header()
            self.metadata: Mapping[str, Any] = reader.metadata
            infos = [reader.tensor_info() for _ in range(num_tensors)]
        except (struct.error, IndexError, UnicodeDecodeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is not a whole GGUF file of version 2 or 3: {error}") from error
        self.config = _config(self)
        start = reader.data_start()
        self.tensors = {tensor.name: tensor for tensor in (self._place(info, start) for info in infos)}
        self.config["tie_word_embeddings"] = "lm_head.weight" not in self.tensors
        self.config["vocab_size"] = self.tensors["model.embed_tokens.weight"].shape[0]

    def fact(self, name: str, default: Any = None) -> Any:
        """A value under the architecture's prefix. Raises CheckpointError when it is missing and has no default."""
        value = self.metadata.get(f"llama.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.path} has no llama.{name}")
        return value

    def read(self, tensor: GgufTensor) -> Held:
        """The tensor with rows in Hugging Face's order: quantized where its blocks are even steps from a whole zero."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = np.frombuffer(self._bytes, np.uint8, _num_bytes(tensor), tensor.offset)
        kind = GGMLQuantizationType(tensor.kind)
        if kind.name in EVEN and len(tensor.shape) == 2:
            return _even_blocks(raw, tensor, kind.name)
        values = np.asarray(dequantize(raw.reshape(*tensor.shape[:-1], -1), kind)).reshape(tensor.shape)
        return values if tensor.num_heads is None else _unpermuted(values, tensor.num_heads)

    def remarks(self) -> tuple[str, ...]:
        """What lies in low bits and is yet read as f32, a sentence a format."""
        from gguf.constants import GGMLQuantizationType

        kinds = Counter(GGMLQuantizationType(tensor.kind).name for tensor in self.tensors.values())
        return tuple(
            f"{count} tensors lie in {kind}, whose blocks have no whole zero point: read as fp32, and rounded anew"
            for kind, count in sorted(kinds.items())
            if kind not in (*EVEN, "F64", "F32", "F16", "BF16")
        )

    def _place(self, info: tuple[str, tuple[int, ...], int, int], start: int) -> GgufTensor:
        theirs, shape, kind, offset = info
        name = _name(theirs, self.path)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        turned = next((self.config[fact] for proj, fact in heads.items() if name.endswith(f"{proj}.weight")), None)
        tensor = GgufTensor(name=name, shape=shape, kind=kind, offset=start + offset, num_heads=turned)
        end = tensor.offset + _num_bytes(tensor)
        if end > len(self._bytes):
            raise CheckpointError(
                f"{self.path} is cut short: {theirs} ends at byte {end:,}, the file has {len(self._bytes):,}",
                hint="download it again",
            )
        return tensor


class _Reader:
    """Walks the header, byte by byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.metadata: dict[str, Any] = {}

    def header(self) -> int:
        """Read up to the tensor list; returns how many tensors it names."""
        if self.data[:4] != MAGIC:
            raise ValueError(f"it starts with {self.data[:4]!r}")
        self.at = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        num_tensors, num_facts = self._scalar("<Q"), self._scalar("<Q")
        for _ in range(num_facts):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        return int(num_tensors)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the slowest axis first, block format, offset from the data's start."""
        name = self._string()
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))
        return name, shape[::-1], self._scalar("<I"), self._scalar("<Q")

    def data_start(self) -> int:
        alignment = int(self.metadata.get("general.alignment", 32))
        return -(-self.at // alignment) * alignment

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        size = self._scalar("<Q")
        if self.at + size > len(self.data):
            raise ValueError(f"a string of {size:,} bytes at byte {self.at:,}")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(SCALARS[kind])
        inner, size = self._scalar("<I"), self._scalar("<Q")
        if inner in (STRING, ARRAY):
            return [self._value(inner) for _ in range(size)]
        values = np.frombuffer(self.data, np.dtype(SCALARS[inner]), size, self.at)
        self.at += values.nbytes
        return values.tolist()


def _config(file: GgufFile) -> dict[str, Any]:
    """The header's facts as a Hugging Face `config.json` would say them."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{file.path} holds a {architecture!r} model; of GGUF files only llama's are read",
            hint="use the model's safetensors",
        )
    num_heads, hidden = file.fact("attention.head_count"), file.fact("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": file.fact("feed_forward_length"),
        "num_hidden_layers": file.fact("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.fact("attention.head_count_kv", num_heads),
        "head_dim": file.fact("attention.key_length", hidden // num_heads),
        "max_position_embeddings": file.fact("context_length"),
        "rms_norm_eps": file.fact("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file),
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _rope(file: GgufFile) -> dict[str, Any]:
    theta = float(file.fact("rope.freq_base", 10000.0))
    scaling = file.fact("rope.scaling.type", "none")
    match scaling:
        case "none":
            return {"rope_type": "default", "rope_theta": theta}
        case "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": float(file.fact("rope.scaling.factor"))}
    raise CheckpointError(f"{file.path}: rotary scaling {scaling!r} is not supported, only none and linear")


def _name(theirs: str, path: Path) -> str:
    if theirs in OUTSIDE:
        return OUTSIDE[theirs]
    head, _, rest = theirs.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    if theirs == "rope_freqs.weight" or head != "blk" or part not in INSIDE or not layer.isdigit():
        raise CheckpointError(
            f"{path} holds {theirs}, which a plain llama has not", hint="use the model's safetensors and config.json"
        )
    return f"model.layers.{layer}.{INSIDE[part]}.{kind}"


def _num_bytes(tensor: GgufTensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{tensor.name} has block format {tensor.kind}, which is not known") from error
    return math.prod(tensor.shape) // int(block_values) * int(block_bytes)


def _even_blocks(raw: NDArray[np.uint8], tensor: GgufTensor, kind: str) -> Quantized:
    """Blocks of 32 numbers: a half-precision scale, then a nibble each (low halves first) or a signed byte each."""
    rows, width = tensor.shape
    blocks = raw.reshape(rows, width // BLOCK, -1)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)
    held = blocks[..., 2:]
    codes = np.concatenate([held & 15, held >> 4], axis=2) if kind == "Q4_0" else held + np.uint8(128)
    if tensor.num_heads is not None:
        codes, scales = (_unpermuted(part, tensor.num_heads) for part in (codes, scales))
    bits = EVEN[kind]
    zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    return Quantized(bits=bits, codes=codes, scales=scales, zeros=zeros, shape=tensor.shape)


def _unpermuted(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """llama.cpp pairs a head's neighbouring rows for rotation; Hugging Face pairs its halves."""
    width = rows.shape[1:]
    return rows.reshape(num_heads, len(rows) // num_heads // 2, 2, *width).swapaxes(1, 2).reshape(-1, *width)
