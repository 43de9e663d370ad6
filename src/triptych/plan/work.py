"""What a step asks of a machine, by the model's shape: operations, bytes, operators by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from triptych.core.bundle import Precision
from triptych.core.filling import COARSE_FROM, size_of
from triptych.core.spec import Counted, DecoderSpec, ModelSpec, ProjectorSpec, VisionSpec
from triptych.errors import ConfigError

BITS: Mapping[str, float] = {  # scales among them
    "fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.5
}  # fmt: skip
CACHE_BITS: Mapping[str, float] = {"f32": 32.0, "bf16": 16.0, "u8": 9.0, "u4": 6.0}  # a number of keys and values
LAYER_OPERATORS = 24  # of a decoder's layer, as compiled: products, norms, rotations, additions
TOWER_OPERATORS = 14  # of a vision tower's


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How numbers lie in memory: weights by part, and the cache of keys and values."""

    decoder: Precision
    vision: Precision = "int8"
    projector: Precision = "int8"
    embedding: Precision = "bf16"
    cache: Literal["f32", "bf16", "u8", "u4"] = "u8"

    @property
    def head(self) -> Precision:
        """Of the LM head, which is never in 4 bits."""
        return "int8" if self.decoder == "int4" else self.decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`num_tokens` of a prompt are computed in this step, `earlier` ones were before. is_last: its answer begins."""

    num_tokens: int
    earlier: int = 0
    is_last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A token each of `answers` sequences that have `cached` tokens in all, and chunks of prompts."""

    answers: int = 0
    cached: int = 0
    chunks: tuple[Chunk, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def rows(self) -> int:
        """Of activations, those included that only fill up."""
        rows = self.answers + self.prompt_tokens
        return rows if rows <= COARSE_FROM else size_of(rows)

    @property
    def sampled(self) -> int:
        return self.answers + sum(chunk.is_last for chunk in self.chunks)

    @property
    def pairs(self) -> int:
        """Of a prompt's token and one that it looks at."""
        return sum(
            chunk.num_tokens * chunk.earlier + chunk.num_tokens * (chunk.num_tokens + 1) // 2 for chunk in self.chunks
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One part of a step. rows: of activations that each weight is multiplied with."""

    precision: Precision
    rows: int
    num_weights: int = 0
    other_flops: float = 0.0  # besides the 2 of each weight and row
    other_bytes: float = 0.0  # besides the weights'
    operators: int = 0

    @property
    def weight_bytes(self) -> float:
        return self.num_weights * BITS[self.precision] / 8

    @property
    def flops(self) -> float:
        return 2.0 * self.num_weights * self.rows + self.other_flops


def decoder_work(spec: DecoderSpec, held: Held, step: Step) -> dict[str, Work]:
    """By part: `layers`, `last` (of the last layer what sampled rows alone go through), `head`, `attention`."""
    seen = step.cached + step.pairs
    kv_read = step.cached + sum(chunk.earlier + chunk.num_tokens for chunk in step.chunks)
    whole, narrow = layer_weights(spec), _narrow_weights(spec)
    layers = Work(
        precision=held.decoder,
        rows=step.rows,
        num_weights=spec.num_layers * whole - narrow,
        operators=spec.num_layers * LAYER_OPERATORS,
    )
    last = Work(precision=held.decoder, rows=step.sampled, num_weights=narrow)
    head = Work(precision=held.head, rows=step.sampled, num_weights=spec.vocab_size * spec.hidden)
    attention = Work(
        precision="bf16",
        rows=step.rows,
        other_flops=4.0 * attended(spec)[0] * seen,
        other_bytes=kv_read * token_bytes(spec, held),
    )
    parts = {"layers": layers, "last": last, "head": head, "attention": attention}
    return parts if step.sampled else {"layers": layers, "attention": attention}


def vision_work(spec: ModelSpec, held: Held, num_tiles: int) -> dict[str, Work]:
    """Of `vision` and `projector`; empty for a model without. Raises ConfigError where shapes do not tell it."""
    if spec.vision is None or spec.projector is None or not num_tiles:
        return {}
    vision, projector = spec.vision, spec.projector
    seen, handed = num_tiles * vision.num_tokens, num_tiles * projector.num_tokens
    if vision.counted is not None:
        tower = _counted(vision.counted, held.vision, seen, num_tiles)
    else:
        tower = Work(
            precision=held.vision,
            rows=seen,
            num_weights=tower_weights(vision),
            other_flops=4.0 * vision.num_layers * vision.hidden * seen * vision.num_tokens,
            operators=TOWER_OPERATORS * vision.num_layers,
        )
    if projector.counted is not None:
        bridge = _counted(projector.counted, held.projector, handed, num_tiles)
    else:
        weights = projector_weights(projector, vision)
        bridge = Work(precision=held.projector, rows=handed, num_weights=weights, operators=4)
    return {"vision": tower, "projector": bridge}


def _counted(part: Counted, precision: Precision, rows: int, num_tiles: int) -> Work:
    """Its weights are read once; how many of the rows each meets is in the count."""
    return Work(
        precision=precision,
        rows=rows,
        other_flops=num_tiles * part.flops,
        other_bytes=part.num_weights * BITS[precision] / 8,
    )


def attended(spec: DecoderSpec) -> tuple[int, int]:
    """Over all layers: numbers of a token's queries; and of these with a cached token's keys, which heads may share."""
    each = spec.num_layers * spec.head_dim
    return each * spec.num_heads, each * (spec.num_heads + spec.num_kv_heads)


def layer_weights(spec: DecoderSpec) -> int:
    """Of the products in one layer."""
    wide, shared = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.hidden * (wide + 2 * shared) + _narrow_weights(spec)


def _narrow_weights(spec: DecoderSpec) -> int:
    """Of a layer's products behind its attention."""
    return spec.hidden * (spec.num_heads * spec.head_dim + 3 * spec.intermediate)


def tower_weights(spec: VisionSpec) -> int:
    if spec.kind != "vit":
        raise ConfigError(
            "a convolutional tower's work is not told by its shape",
            hint="plan for the bundle, whose graph tells it: `triptych compile` first",
        )
    return (
        spec.num_layers * (4 * spec.hidden**2 + 2 * spec.hidden * spec.intermediate) + 3 * spec.patch**2 * spec.hidden
    )


def projector_weights(spec: ProjectorSpec, vision: VisionSpec) -> int:
    if spec.kind == "pixel_shuffle":
        return spec.hidden * vision.hidden * spec.shuffle**2
    return spec.hidden * vision.hidden + (spec.hidden**2 if spec.kind == "mlp" else 0)


def token_bytes(spec: DecoderSpec, held: Held, degree: int = 1) -> float:
    """Of keys and values that one token leaves in the cache, on each of `degree` devices: heads are never cut."""
    whole = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * CACHE_BITS[held.cache] / 8
    return whole / min(degree, spec.num_kv_heads)


def part_bytes(spec: ModelSpec, held: Held) -> dict[str, float]:
    """Of weights, by part as a bundle has them; a tower whose shape does not tell is left out."""
    step = decoder_work(spec.decoder, held, Step(answers=1))
    towers = vision_work(spec, held, 1) if _is_told(spec) else {}
    table = spec.decoder.vocab_size * spec.decoder.hidden * BITS[held.embedding] / 8
    return {
        **{name: tower.weight_bytes + tower.other_bytes for name, tower in towers.items()},
        "embedding": table,
        "decoder": sum(work.weight_bytes for work in step.values()),
    }


def _is_told(spec: ModelSpec) -> bool:
    return spec.vision is not None and (spec.vision.kind == "vit" or spec.vision.counted is not None)


def check_cut(spec: DecoderSpec, degree: int) -> None:
    """Raises ConfigError for a number of devices that heads and columns are not divided among evenly."""
    if spec.num_heads % degree or spec.intermediate % degree:
        wide = f"{spec.num_heads} heads and {spec.intermediate:,} columns of the MLP"
        raise ConfigError(f"{wide} are not cut evenly in {degree}")
    few, many = sorted((spec.num_kv_heads, degree))
    if many % few:
        raise ConfigError(f"{spec.num_kv_heads} heads of keys and values are not shared evenly by {degree} devices")


def on_one_of(work: Work, degree: int, num_kv_heads: int) -> Work:
    """A device's share when `degree` of them hold each product together (tensor parallel), and heads of keys whole."""
    return replace(
        work,
        num_weights=work.num_weights // degree,
        other_flops=work.other_flops / degree,
        other_bytes=work.other_bytes / min(degree, num_kv_heads),
    )
