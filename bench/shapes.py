"""Bundles of any shape with random weights, made in a second: for what depends on sizes alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from triptych.compile import parts
from triptych.compile.graph import Store
from triptych.compile.join import join
from triptych.core.bundle import MANIFEST, Bundle, Manifest, Part, Precision, describe, open_bundle, write_bundle
from triptych.core.quantized import Held, Quantized
from triptych.core.spec import DecoderSpec, Modality, ModelSpec, VisionSpec

GROUP = 64  # weights that share a scale in int4, as `triptych compile` has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A SigLIP of this size; its projector shuffles 4 × 4 rows into one, as SmolVLM's does."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    side: int = 384  # pixels of a tile
    patch: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama of this size, heads of 64."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 16384
    tower: Tower | None = None

    def spec(self, base: ModelSpec) -> ModelSpec:
        """`base` in this size: a SmolVLM, whose marks and tokenizer are taken over."""
        change = msgspec.structs.replace
        decoder = change(
            base.decoder,
            num_layers=self.layers,
            hidden=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=64,
            intermediate=self.intermediate,
            vocab_size=self.vocab,
            tied=True,
        )
        if self.tower is None:
            return change(
                base, family="text", decoder=decoder, vision=None, projector=None, image=None, image_token_id=None
            )
        assert base.vision is not None
        assert base.projector is not None
        assert base.image is not None
        tower, shuffle = self.tower, base.projector.shuffle
        rows = (tower.side // tower.patch) ** 2
        vision = change(
            base.vision,
            image_size=tower.side,
            patch=tower.patch,
            num_tokens=rows,
            hidden=tower.hidden,
            num_layers=tower.layers,
            num_heads=tower.heads,
            intermediate=tower.intermediate,
        )
        few = rows // shuffle**2
        projector = change(base.projector, num_tokens=few, hidden=self.hidden)
        image = change(
            base.image, tiling="one", fit="squash", tile_size=tower.side, tokens_per_tile=few, longest_edge=None
        )
        return change(base, decoder=decoder, vision=vision, projector=projector, image=image)


def make(shape: Shape, precisions: dict[str, Precision], base: Path, folder: Path) -> Bundle:
    """The bundle in `folder`, made where it is not there yet. precisions: of `decoder`, and of `vision`.

    base: a SmolVLM's bundle, for its tokenizer, chat template and marks.
    """
    target = folder / "-".join([shape.name, *(f"{part[0]}{precision}" for part, precision in precisions.items())])
    if (target / MANIFEST).is_file():
        return open_bundle(target)
    like = open_bundle(base)
    spec = shape.spec(like.manifest.spec)

    def fill(scratch: Path) -> Manifest:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if like.file(name).is_file():
                shutil.copyfile(like.file(name), scratch / name)
        made = [_part(part, spec, precisions, scratch) for part in parts.names(spec)]
        made.append(_table(spec.decoder, scratch))
        return msgspec.structs.replace(
            like.manifest,
            name=target.name,
            spec=spec,
            parts=tuple(made),
            files=tuple(describe(path, root=scratch) for path in sorted(scratch.iterdir())),
            weights_digest=target.name,
            evidence=(),
            history=(),
        )

    return write_bundle(target, fill)


def _part(part: parts.PartName, spec: ModelSpec, precisions: dict[str, Precision], folder: Path) -> Part:
    precision = precisions["decoder" if part == "decoder" else "vision"]
    store = Store(precision, transcribes=precision in ("int8", "int4"))
    weights = {
        "decoder": _weights(_decoder_sizes(spec.decoder), precision),
        "vision": _weights({} if spec.vision is None else _vision_sizes(spec.vision), precision),
        "projector": _weights({} if spec.projector is None else _projector_sizes(spec), precision),
    }
    model = parts.build(part, spec, weights, store)
    if part == "decoder" and precision != "fp32":
        join(model)
    path = folder / f"{part}.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    return Part(
        name=part,
        modality=Modality.TEXT if part == "decoder" else Modality.IMAGE,
        precision=precision,
        files=(path.name, path.with_suffix(".bin").name),
        inputs=tuple(port.get_any_name() for port in model.inputs),
        outputs=tuple(port.get_any_name() for port in model.outputs),
        num_parameters=store.num_parameters,
    )


def _table(spec: DecoderSpec, folder: Path) -> Part:
    np.save(folder / "embedding.npy", _noise((spec.vocab_size, spec.hidden)))
    return Part(
        name="embedding",
        modality=Modality.TEXT,
        precision="fp32",
        files=("embedding.npy",),
        inputs=("token_ids",),
        outputs=("embeddings",),
        num_parameters=spec.vocab_size * spec.hidden,
    )


def _weights(sizes: dict[str, tuple[int, ...]], precision: Precision) -> Callable[[str], Held]:
    def weight(name: str) -> Held:
        size = sizes[name]
        if len(size) == 1:
            return np.ones(size, np.float32) if name.endswith("weight") else np.zeros(size, np.float32)
        if len(size) == 2 and precision in ("int8", "int4") and "embed" not in name.replace("embed_tokens", ""):
            is_head = name == "embed_tokens.weight"
            return _codes(size, 8 if precision == "int8" or is_head or size[1] % GROUP else 4)
        return _noise(size)

    return weight


def _noise(size: tuple[int, ...]) -> NDArray[np.float32]:
    count = int(np.prod(size))
    block = np.random.default_rng(0).standard_normal(min(count, 1 << 16), np.float32)
    values = np.resize(block, count) * np.float32(1 / np.sqrt(np.prod(size[1:])))
    return values.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(size)


def _codes(size: tuple[int, int], bits: int) -> Quantized:
    rows, width = size
    group = GROUP if bits == 4 else width
    rng = np.random.default_rng(0)
    block = rng.integers(0, 2**bits, min(rows * width, 1 << 16), np.uint8)
    groups = (rows, width // group, 1)
    return Quantized(
        bits=bits,
        codes=np.resize(block, rows * width).reshape(rows, width // group, group),
        scales=np.full(groups, 3.5 / 2**bits / np.sqrt(width), np.float16),
        zeros=rng.integers(2 ** (bits - 1) - 1, 2 ** (bits - 1) + 1, groups).astype(np.uint8),
        shape=size,
    )


def _decoder_sizes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    hidden, wide, shared = spec.hidden, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (spec.intermediate, hidden),
        "mlp.up_proj": (spec.intermediate, hidden),
        "mlp.down_proj": (hidden, spec.intermediate),
    }
    sizes = {f"layers.{i}.{name}.weight": size for i in range(spec.num_layers) for name, size in layer.items()}
    return {**sizes, "norm.weight": (hidden,), "embed_tokens.weight": (spec.vocab_size, hidden)}


def _vision_sizes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    hidden, wide = spec.hidden, spec.intermediate
    sizes: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (hidden, 3, spec.patch, spec.patch),
        "embeddings.patch_embedding.bias": (hidden,),
        "embeddings.position_embedding.weight": (spec.num_tokens, hidden),
        "post_layernorm.weight": (hidden,),
        "post_layernorm.bias": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "layer_norm1": (hidden,),
        "layer_norm2": (hidden,),
        "mlp.fc1": (wide, hidden),
        "mlp.fc2": (hidden, wide),
        **{f"self_attn.{proj}_proj": (hidden, hidden) for proj in ("q", "k", "v", "out")},
    }
    for index in range(spec.num_layers):
        for name, size in layer.items():
            sizes |= {f"encoder.layers.{index}.{name}.weight": size, f"encoder.layers.{index}.{name}.bias": size[:1]}
    return sizes


def _projector_sizes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    assert spec.vision is not None
    assert spec.projector is not None
    return {"proj.weight": (spec.decoder.hidden, spec.vision.hidden * spec.projector.shuffle**2)}
